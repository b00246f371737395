"""Errors of a file system are one line, which names the file and blames no field for another one's file."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from searches.app.application import explain


def _error(path: Path, mode: str = "w") -> OSError:
    with pytest.raises(OSError, match="Errno") as raised, path.open(mode, buffering=1) as file:
        file.write("line\n")
    return raised.value


def test_a_full_standard_output_is_not_blamed_on_the_outputs_folder() -> None:
    line = explain(_error(Path("/dev/full")))
    assert line == f"a file or the standard output cannot be written: {os.strerror(28)}"


def test_a_folder_that_became_read_only_is_named(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert explain(_error(small_disk / "file")) == f"outputs: cannot write {small_disk}/file: Read-only file system"


def test_a_missing_file_is_a_defect(tmp_path: Path) -> None:
    assert explain(_error(tmp_path / "file", "r")) is None


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("could not create a primitive")], ids=str)
def test_memory_that_does_not_suffice_is_one_line(error: Exception) -> None:
    line = explain(error)
    assert line is not None
    assert line.startswith("memory: does not suffice")

"""Results: a log keeps what was added, and locks share work among processes; a killed one leaves its part to the others."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from layerskip import ConfigError
from searches.results import ResultLog, exclusive, exclusive_if_free
from tests.resources import fill
from tests.searches.programs import FORKS


def test_results_are_there_for_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    log = ResultLog(path)
    log.add("a", {"value": 1})
    log.add("b", [2])
    assert (list(log), len(log), log["b"], "c" in log) == (["a", "b"], 2, [2], False)
    again = ResultLog(path)
    assert {name: again[name] for name in again} == {"a": {"value": 1}, "b": [2]}
    assert list(ResultLog(None)) == []


@pytest.mark.parametrize("line", [b'["b", {"va', b'["b", 2]', b'["a"]\n', bytes(80), bytes(80) + b"\n"])
def test_a_partial_or_damaged_last_line_is_dropped(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'["a", 1]\n' + line)
    log = ResultLog(path)
    assert list(log) == ["a"]
    log.add("c", 3)
    assert path.read_text() == '["a", 1]\n["c", 3]\n'


@pytest.mark.parametrize("line", ["{", '["a"]'])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f'["a", 1]\n{line}\n["b", 2]\n')
    with pytest.raises(ConfigError, match=f"^outputs: {path} is damaged in line 2; delete it"):
        ResultLog(path)


def test_a_value_that_does_not_fit_on_the_disk_leaves_whole_lines(small_disk: Path) -> None:
    path = small_disk / "log.jsonl"
    log = ResultLog(path)
    log.add("a", 1)
    fill(small_disk, 50_000)
    with pytest.raises(OSError, match="No space left on device") as refusal:
        log.add("b", "x" * 100_000)
    assert refusal.value.filename == str(path)
    (small_disk / "ballast").unlink()
    log.add("c", 3)
    assert list(ResultLog(path)) == ["a", "c"]


@pytest.mark.parametrize("name", ["file", "x" * 250])
def test_a_lock_is_free_until_it_is_held(name: str, tmp_path: Path) -> None:
    with exclusive_if_free(tmp_path / name) as mine, exclusive_if_free(tmp_path / name) as again:
        assert (mine, again) == (True, False)
    with exclusive(tmp_path / name), exclusive_if_free(tmp_path / name) as mine:
        assert not mine


def test_a_program_waits_for_the_one_that_holds_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = contextlib.ExitStack()
    other.enter_context(exclusive(tmp_path / "file"))
    monkeypatch.setattr(time, "sleep", lambda _: other.close())  # the other one ends meanwhile
    with exclusive(tmp_path / "file"), exclusive_if_free(tmp_path / "file") as mine:
        assert not mine
    assert capsys.readouterr().out == f"waiting for another program, which writes {tmp_path / 'file'}\n"


def _forbid_locks(number: int) -> None:
    fcntl.flock = Mock(side_effect=OSError(number, os.strerror(number)))


def _be_killed_with_a_lock(path: Path, number: int) -> None:
    _forbid_locks(number)
    with exclusive(path):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_is_the_lock_where_the_file_system_has_none(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = FORKS.Process(target=_be_killed_with_a_lock, args=(tmp_path / "file", number))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    monkeypatch.setattr(fcntl, "flock", fcntl.flock)  # restored at the end
    _forbid_locks(number)
    with exclusive(tmp_path / "file"), exclusive_if_free(tmp_path / "file") as mine:
        assert not mine
    with exclusive_if_free(tmp_path / "file") as mine:
        assert mine
    line = f"the file system of {tmp_path} has no locks; .file.lock.held is one: delete it if its program was killed\n"
    assert capsys.readouterr().out == line


def test_other_errors_of_a_lock_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", fcntl.flock)
    _forbid_locks(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"), exclusive(tmp_path / "file"):
        pytest.fail("it is not locked")

"""Work shared by several processes: one of them does each part, and a killed one leaves its part to the others."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from searches.app.file_lock import exclusive, exclusive_if_free, share_work
from tests.searches.programs import FORKS


def test_a_lock_is_free_until_it_is_held(tmp_path: Path) -> None:
    with exclusive_if_free(tmp_path / "file") as mine, exclusive_if_free(tmp_path / "file") as again:
        assert (mine, again) == (True, False)
    with exclusive(tmp_path / "file"), exclusive_if_free(tmp_path / "file") as mine:
        assert not mine


def test_work_of_other_processes_comes_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    free = threading.Event()

    def work(key: str) -> str:
        done.append(key)
        if key == "c":
            free.set()
        return key.upper()

    found: dict[str, str] = {}
    shared = threading.Thread(target=lambda: found.update(share_work({key: tmp_path / key for key in "abc"}, work)))
    with exclusive(tmp_path / "b"):
        shared.start()
        assert free.wait(10)
        assert done == ["a", "c"]
    shared.join(10)
    assert done == ["a", "c", "b"]
    assert found == {"a": "A", "b": "B", "c": "C"}
    assert capsys.readouterr().out.count("waiting for another program") <= 1


def test_an_error_releases_the_lock(tmp_path: Path) -> None:
    def fails(key: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        share_work({"a": tmp_path / "a"}, fails)
    assert share_work({"a": tmp_path / "a"}, str.upper) == {"a": "A"}


def _forbid_locks(number: int) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    fcntl.flock = fail


def _be_killed_with_a_lock(path: Path, number: int) -> None:
    _forbid_locks(number)
    with exclusive(path):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
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


def test_a_long_name_has_a_lock(tmp_path: Path) -> None:
    with exclusive(tmp_path / ("x" * 250)), exclusive_if_free(tmp_path / ("x" * 250)) as mine:
        assert not mine

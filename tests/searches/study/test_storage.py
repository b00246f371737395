"""The storage of a study: its lock, refused files, and databases that another worker creates or that cannot be opened."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import optuna
import pytest
import sqlalchemy
from optuna.storages import RDBStorage

from layerskip import ConfigError
from searches.app.checks import InputError
from searches.study import storage
from searches.study.storage import locked, open_database, open_journal, place, storage_url
from searches.study.study import StudySettings
from tests.disk import fill


def test_a_folder_is_locked_until_its_study_ends(tmp_path: Path) -> None:
    with locked(tmp_path / "one"):
        with pytest.raises(InputError, match="^study.name: another process is running the study in "):
            locked(tmp_path / "one").__enter__()
        with locked(tmp_path / "other"):
            pass
    with locked(tmp_path / "one"):
        pass


def test_names_that_no_folder_can_have_are_refused(tmp_path: Path) -> None:
    for name in ("", ".", "..", "a/b"):
        with pytest.raises(InputError, match="^study.name: .* cannot be the name of a folder$"):
            StudySettings(name=name)
    with pytest.raises(InputError, match="^study.name: .*File name too long$"):
        place(tmp_path, "x" * 300, StudySettings(), "cpu", shared=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["file/study.log", "folder"])
def test_a_journal_that_cannot_be_written_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=f"^study.storage: cannot write {tmp_path / path}: "):
        open_journal(tmp_path / path, alone=True)


@pytest.mark.parametrize("content", [b"SQLite format 3\0and more", b"notes\nof mine"])
def test_a_file_that_is_not_a_journal_is_not_changed(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "studies.db"
    file.write_bytes(content)
    with pytest.raises(InputError, match=f"^study.storage: {file} is no Optuna journal"):
        open_journal(file, alone=True)
    assert file.read_bytes() == content


def test_a_database_that_another_worker_creates_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = sqlalchemy.exc.OperationalError("CREATE", {}, sqlite3.OperationalError("table studies already exists"))
    attempts = iter([exists, exists])

    def create(url: str, **options: Any) -> RDBStorage:
        for error in attempts:
            raise error
        return RDBStorage(url, **options)

    monkeypatch.setattr(storage, "RDBStorage", create)
    monkeypatch.setattr(storage.time, "sleep", lambda _: None)
    assert optuna.create_study(storage=open_database(f"sqlite:///{tmp_path}/study.db")).trials == []


def test_a_proxy_needs_grpcio(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**_: Any) -> NoReturn:
        raise ImportError("No module named 'grpc'")

    monkeypatch.setattr(storage, "GrpcStorageProxy", missing)
    with pytest.raises(InputError, match="^study.storage: grpc://there needs grpcio"):
        open_database("grpc://there")


def test_a_database_that_cannot_be_opened_is_refused_without_its_password() -> None:
    place = r"postgresql\+psycopg://me:\*\*\*@127.0.0.1:1/it"
    with pytest.raises(InputError, match=rf"^study\.storage: cannot open {place}: ") as raised:
        open_database("postgresql://me:secret@127.0.0.1:1/it")
    assert "secret" not in str(raised.value)


def _journal(path: Path, trials: int = 2) -> list[bytes]:
    """Write the journal of a study with some trials; return its lines."""
    study = optuna.create_study(study_name="s", storage=open_journal(path, alone=True), load_if_exists=True)
    for value in range(trials):
        study.tell(study.ask(), float(value))
    return path.read_bytes().splitlines(keepends=True)


def _trials(path: Path) -> list[int]:
    return [trial.number for trial in optuna.load_study(study_name="s", storage=open_journal(path, alone=False)).trials]


@pytest.mark.parametrize("end", [b'{"op_co', b'{"op_code":4}\n', bytes(90), bytes(90) + b"\n"])
def test_a_damaged_last_line_of_a_journal_is_dropped(end: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "journal.log"
    whole = b"".join(_journal(path))
    path.write_bytes(whole + end)
    assert _trials(path) == [0, 1]
    assert path.read_bytes() == whole
    dropped = f"study.storage: the last line of {path} is damaged and was dropped\n"
    cut_off = f"{path}: its last line is cut off, as after a kill or on a full disk, and is dropped\n"
    assert capsys.readouterr().out == (dropped if end.endswith(b"\n") else cut_off)
    _journal(path)
    assert _trials(path) == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize(
    "damaged", [b"\n", b"[]\n", b'{"op_code":4}\n', b'{"op_code":4,"worker_id":"w"}\n', bytes(9) + b"\n"]
)
def test_a_damaged_line_of_a_journal_is_named_by_its_number(number: int, damaged: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    lines = _journal(path)
    lines[number - 1] = damaged
    path.write_bytes(b"".join(lines))
    with pytest.raises(
        ConfigError, match=f"^study.storage: {path} is damaged in line {number}; restore it, or keep the lines before"
    ):
        open_journal(path, alone=True)
    assert path.read_bytes() == b"".join(lines)


def test_a_journal_on_a_full_disk_names_the_file_and_goes_on_when_there_is_space(small_disk: Path) -> None:
    path = small_disk / "journal.log"
    study = optuna.create_study(study_name="s", storage=open_journal(path, alone=True))
    fill(small_disk, 50_000)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left on device") as refusal:
            study.set_user_attr("large", "x" * 300_000)
        assert refusal.value.filename == str(path)
    (small_disk / "ballast").unlink()
    study.tell(study.ask(), 1.0)
    assert _trials(path) == [0]


def test_a_journal_needs_no_symbolic_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "symlink", fail)
    assert _journal(tmp_path / "journal.log")
    assert _trials(tmp_path / "journal.log") == [0, 1]


_HOLD = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def _held(file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Let another program hold an SQLite database until its standard input is closed."""
    command = [sys.executable, "-c", _HOLD, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"held\n"
        yield program


@pytest.mark.parametrize("is_new", [True, False])
def test_a_database_that_another_program_holds_is_waited_for(
    is_new: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storage, "_LOCK_SECONDS", 0.01)
    file = tmp_path / "q?x" / "study.db"
    file.parent.mkdir()
    url = storage_url(StudySettings(), file.parent)
    study = None if is_new else optuna.create_study(study_name="s", storage=open_database(url))
    with _held(file) as program:
        monkeypatch.setattr("searches.connections.time.sleep", lambda _: program.communicate())  # between two attempts
        study = study or optuna.create_study(study_name="s", storage=open_database(url))
        study.tell(study.ask(), 1.0)
    assert [trial.value for trial in study.trials] == [1.0]
    start = f"study.storage: {file}, which another program locked,"
    assert capsys.readouterr().out == f"{start} cannot be reached; trying again for 10 minutes\n{start} is back\n"
    assert [path.name for path in tmp_path.iterdir()] == ["q?x"]


def test_a_database_that_is_held_for_too_long_or_damaged_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_LOCK_SECONDS", 0.01)
    monkeypatch.setattr(storage, "_PATIENCE", 0.0)
    file = tmp_path / "study.db"
    study = optuna.create_study(study_name="s", storage=open_database(f"sqlite:///{file}"))
    with _held(file) as program:
        for use in (study.ask, lambda: open_database(f"sqlite:///{file}")):
            with pytest.raises(InputError, match=f"^study.storage: cannot .*{file}: .*database is locked"):
                use()
        program.communicate()
    file.write_bytes(b"SQLite format 3\0" + bytes(5000))
    for use in (study.ask, lambda: open_database(f"sqlite:///{file}")):
        with pytest.raises(InputError, match=f"^study.storage: cannot .*{file}: .*(malformed|not a database)"):
            use()


def test_a_database_on_a_full_disk_names_the_file(small_disk: Path) -> None:
    study = optuna.create_study(study_name="s", storage=open_database(f"sqlite:///{small_disk}/study.db"))
    fill(small_disk, 20_000)
    with pytest.raises(OSError, match="No space left on device") as refusal:
        study.set_user_attr("large", "x" * 1900 * 100)
    assert refusal.value.filename == str(small_disk / "study.db")
    (small_disk / "ballast").unlink()
    study.tell(study.ask(), 1.0)
    assert len(study.trials) == 1

"""The storage of a study: its lock, refused files, and databases that another worker creates or that cannot be opened."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, NoReturn

import optuna
import pytest
import sqlalchemy
from optuna.storages import RDBStorage

from searches.app.checks import InputError
from searches.study import storage
from searches.study.storage import locked, open_database, open_journal


def test_a_folder_is_locked_until_its_study_ends(tmp_path: Path) -> None:
    with locked(tmp_path / "one"):
        with (
            pytest.raises(InputError, match="^study.name: another process is running the study in "),
            locked(tmp_path / "one"),
        ):
            pytest.fail("it is locked")
        with locked(tmp_path / "other"):
            pass
    with locked(tmp_path / "one"):
        pass


@pytest.mark.parametrize("path", ["file/study.log", "folder"])
def test_a_journal_that_cannot_be_written_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=f"^study.storage: cannot write {tmp_path / path}: "):
        open_journal(tmp_path / path, alone=True)


def _failing(times: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make the first attempts to open a database fail; return the list of attempts."""
    attempts: list[str] = []

    def create(url: str, **options: Any) -> RDBStorage:
        attempts.append(url)
        if len(attempts) <= times:
            raise error
        return RDBStorage(url, **options)

    monkeypatch.setattr(storage, "RDBStorage", create)
    monkeypatch.setattr(storage.time, "sleep", lambda _: None)
    return attempts


def test_a_database_that_another_worker_creates_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = sqlalchemy.exc.OperationalError("CREATE", {}, sqlite3.OperationalError("table studies already exists"))
    attempts = _failing(2, exists, monkeypatch)
    study = optuna.create_study(storage=open_database(f"sqlite:///{tmp_path}/study.db"))
    assert len(attempts) == 3
    assert study.trials == []


def test_a_database_that_cannot_be_opened_is_refused_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = sqlalchemy.exc.OperationalError("SELECT", {}, Exception("connection refused"))
    attempts = _failing(100, refused, monkeypatch)
    with pytest.raises(
        InputError, match=r"^study\.storage: cannot open postgresql\+psycopg://me:\*\*\*@there/it: "
    ) as raised:
        open_database("postgresql://me:secret@there/it")
    assert "secret" not in str(raised.value)
    assert attempts == ["postgresql+psycopg://me:secret@there/it"]


def test_a_proxy_needs_grpcio(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**_: Any) -> NoReturn:
        raise ImportError("No module named 'grpc'")

    monkeypatch.setattr(storage, "GrpcStorageProxy", missing)
    with pytest.raises(InputError, match="^study.storage: grpc://there needs grpcio"):
        open_database("grpc://there")

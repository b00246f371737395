"""The storage of studies: a journal file or a database, and the lock of a study's folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import filelock
import optuna
import sqlalchemy
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend

from layerskip.device.failures import first_line
from searches.app.checks import InputError
from searches.app.resume_log import drop_partial_line
from searches.app.urls import without_password
from searches.workers.retrying_storage import RetryingStorage

_JOURNAL = b'{"op_code":'
_LOCK_SECONDS = 60  # that a process waits for another one's transaction in an SQLite database
_ATTEMPTS = 20
_CREATED_BY_OTHERS = ("already exists", "duplicate key", "UNIQUE constraint", "database is locked")
_PROXY_PORT = 13000  # Optuna's default
_PROXY_SECONDS = 10.0
"""Time in which a storage proxy must answer when a study is opened."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a study's folder, or refuse it if another process does. The kernel releases it with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / "lock")
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise InputError(f"study.name: another process is running the study in {folder}") from None
    try:
        yield
    finally:
        lock.release()


def open_journal(path: Path, alone: bool) -> BaseStorage:
    """Open the storage of a study in a journal file.

    Args:
        path: of the file.
        alone: whether no other process may write it, so that an existing lock was left by a killed process.

    Raises:
        InputError: the file cannot be written or is no journal of Optuna.
    """
    path = path.resolve()  # Optuna's lock is a link to the path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_journal(path)
        drop_partial_line(path)
        if alone:
            path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
        return JournalStorage(JournalFileBackend(str(path)))
    except (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise InputError(f"study.storage: cannot write {path}: {error.strerror}") from error


def _check_journal(path: Path) -> None:
    """Refuse a file that Optuna did not write, before its last line is repaired; an empty or cut-off first line is fine."""
    if not path.exists():
        return
    with path.open("rb") as file:
        start = file.read(len(_JOURNAL))
    if not (start.startswith(_JOURNAL) or _JOURNAL.startswith(start)):
        raise InputError(
            f"study.storage: {path} is no Optuna journal; a database is given by its URL, as in sqlite:///study.db"
        )


def open_database(url: str) -> BaseStorage:
    """Open the storage of a study in a database, which may be lost for a while later; refuse one that cannot be reached."""
    if url.startswith("grpc://"):
        return RetryingStorage(_open_proxy(url))
    # SQLAlchemy would look for another driver first.
    url = url.replace("postgresql://", "postgresql+psycopg://", 1)
    is_file = url.startswith("sqlite")
    options = {"pool_pre_ping": True} | ({"connect_args": {"timeout": _LOCK_SECONDS}} if is_file else {})
    for attempt in range(_ATTEMPTS):
        try:
            storage = RDBStorage(url, engine_kwargs=options)
            break
        except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError, ImportError) as error:
            # Of workers that start at the same time, one creates the tables.
            if attempt == _ATTEMPTS - 1 or not any(sign in str(error) for sign in _CREATED_BY_OTHERS):
                raise InputError(
                    f"study.storage: cannot open {without_password(url)}: {first_line(error.__cause__ or error)}"
                ) from error
            time.sleep(0.1)
    if is_file:
        _begin_at_once(storage)
    return RetryingStorage(get_storage(storage))


def _begin_at_once(storage: RDBStorage) -> None:
    """Lock an SQLite database at the beginning of each transaction.

    Optuna first reads the state of a trial and then changes it. SQLite knows no ``SELECT ... FOR UPDATE``, so that two
    processes could both finish a trial.
    """

    def connect(connection: Any, record: object) -> None:
        connection.isolation_level = None  # the driver would begin with the first change

    storage.engine.dispose()
    sqlalchemy.event.listen(storage.engine, "connect", connect)
    sqlalchemy.event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))


def _open_proxy(url: str) -> BaseStorage:
    """Connect to a storage proxy of Optuna, ``grpc://host:port``."""
    try:
        place = urlsplit(url)
        proxy = GrpcStorageProxy(host=place.hostname or "localhost", port=place.port or _PROXY_PORT)
        proxy.wait_server_ready(timeout=_PROXY_SECONDS)
    except ImportError as error:
        raise InputError(f"study.storage: {url} needs grpcio, which is part of layerskip[launchers]") from error
    except (ValueError, ConnectionError) as error:
        raise InputError(f"study.storage: cannot open {url}: {first_line(error)}") from error
    return proxy

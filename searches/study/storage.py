"""The storage of studies: a database, by default SQLite in the study's folder, and the workers that share a study."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from omegaconf import DictConfig, OmegaConf
from optuna.storages import BaseStorage, RDBStorage, get_storage
from optuna.trial import FrozenTrial
from sqlalchemy.orm import Session

from layerskip import SpeculativeConfig, Target
from layerskip.device.trial import first_line
from layerskip.export import PROVISIONAL
from layerskip.files import digest, read_json
from layerskip.models.environment import machine
from searches.app.checks import InputError
from searches.app.interrupt import error_chain
from searches.connections import Result, Retry, RetryingStorage, is_unreachable, sqlite_file, sqlite_url, without_password
from searches.results import exclusive, exclusive_if_free
from searches.study.finals import Finalist, Finals
from searches.tracking.tracker import Tracker
from searches.workers.pool import ALONE, WorkerPool, Workers, has_board

_DATABASE = "study.db"
_LOCK_SECONDS = 10  # that SQLite waits for another process's transaction, before a line is printed
_PATIENCE = 600.0  # seconds that a database may be away for
_ATTEMPTS = 20
_CREATED_BY_OTHERS = ("already exists", "duplicate key", "UNIQUE constraint")


class _DatabaseRetry(Retry):
    """Repetition of calls to a database; a full disk ends them as an OSError, other faults as an InputError."""

    def __init__(self, url: str) -> None:
        file = sqlite_file(url)
        # Of a file, nothing but a lock passes by itself.
        what = "the database" if file is None else f"{file}, which another program locked,"
        super().__init__(f"study.storage: {what}", _PATIENCE)
        self._place = file or without_password(url)

    def __call__(self, call: Callable[[], Result]) -> Result:
        try:
            return super().__call__(call)
        except Exception as error:
            origin = next((link for link in error_chain(error) if isinstance(link, sqlite3.DatabaseError)), None)
            if "disk is full" in str(origin):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._place)) from error
            if type(origin) in (sqlite3.OperationalError, sqlite3.DatabaseError) or is_unreachable(error):
                reason = first_line(origin or error.__cause__ or error)
                raise InputError(
                    f"study.storage: cannot use {self._place}: {reason}; the same command continues afterwards"
                ) from error
            raise


def open_database(url: str) -> BaseStorage:
    """Open the storage of a study in a database, which may be lost for a while later; refuse one that cannot be reached."""
    # SQLAlchemy would look for another driver first.
    url = url.replace("postgresql://", "postgresql+psycopg://", 1)
    is_file = url.startswith("sqlite")
    options = {"pool_pre_ping": True} | ({"connect_args": {"timeout": _LOCK_SECONDS}} if is_file else {})
    create, retry = partial(RDBStorage, url, engine_kwargs=options), _DatabaseRetry(url)
    for attempt in range(_ATTEMPTS):
        try:
            storage = Retry.__call__(retry, create) if is_file else create()
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
    return RetryingStorage(get_storage(storage), retry, partial(_transaction, storage))


@contextlib.contextmanager
def _transaction(storage: RDBStorage) -> Iterator[None]:
    """Make one transaction of all calls of this thread to a storage in the block."""
    sessions = storage.scoped_session.registry
    with storage.engine.begin() as connection:
        sessions.set(Session(connection, join_transaction_mode="create_savepoint"))
        try:
            yield
        finally:
            sessions.clear()


def _begin_at_once(storage: RDBStorage) -> None:
    """Lock an SQLite database at the beginning of each transaction, and wait for the disk less often in it.

    Optuna first reads the state of a trial and then changes it. SQLite knows no ``SELECT ... FOR UPDATE``, so that two
    processes could both finish a trial. A killed process loses nothing that it has written.
    """

    def connect(connection: Any, record: object) -> None:
        connection.isolation_level = None  # the driver would begin with the first change
        connection.execute("PRAGMA synchronous = NORMAL")

    storage.engine.dispose()
    sqlalchemy.event.listen(storage.engine, "connect", connect)
    sqlalchemy.event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))


def device_type(target: Target) -> str:
    """Return the type of the target's device, as far as speeds depend on it: a GPU, or a processor and its threads."""
    about = machine(target)
    return str(about["device_name"]) + (f", {about['threads']} threads" if about["device"] == "cpu" else "")


@contextlib.contextmanager
def joined(
    name: str, folder: Path, worker: int | None, device: str, database: BaseStorage | None
) -> Iterator[tuple[BaseStorage, Workers]]:
    """Open the storage of a study, which is in its folder unless there is a ``database``, and join its workers.

    Others may work on a study with a database of its own, with a numbered ``worker``, or with workers before. Any other
    study is locked, for a process alone.

    Raises:
        InputError: another process works on the study alone, or the study measures on another type of device.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / _DATABASE
    storage = database or open_database(sqlite_url(file))
    if worker is None and database is None and not has_board(storage, name):
        with exclusive_if_free(file) as free:
            if not free:
                raise InputError(f"study.name: another process is running the study in {folder}")
            if not has_board(storage, name):  # a worker may have joined since
                assert isinstance(storage, RetryingStorage)
                storage.is_alone = True
                try:
                    yield storage, ALONE
                finally:
                    storage.is_alone = False
                return
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it warns of every connection that breaks
    with contextlib.ExitStack() as stack:
        with contextlib.nullcontext() if database is not None else exclusive(file):  # a process alone ends first
            pool = stack.enter_context(WorkerPool(storage, name, device))
        first = pool.share("device", lambda: device)
        if first != device:
            raise InputError(
                f"study.name: study {name} measures on {first}, and this is {device}; choose another name for its results"
            )
        print(f"worker {pool.name} works on study {name}", flush=True)
        yield storage, pool


def share_finals(pool: Workers, trials: Sequence[FrozenTrial], measure: Callable[[Callable[[], None]], Finals]) -> Finals:
    """Return the finals of a study with some finished trials, which one of its workers measures and publishes.

    ``measure`` does both. It calls its argument from time to time, which raises an error if another worker does them now.
    """
    name = f"finals {digest([trial.number for trial in trials])[:16]}"

    def work() -> dict[str, Any]:
        finals = measure(partial(pool.check, name))
        return vars(finals) | {"finalists": [vars(row) | {"config": row.config.to_dict()} for row in finals.finalists]}

    fields = pool.share(name, work)
    rows = (row | {"config": SpeculativeConfig.from_dict(row["config"])} for row in fields["finalists"])
    return Finals(**fields | {"finalists": tuple(Finalist(**row) for row in rows)})


def is_exported(path: Path, study: str, trials: int) -> bool:
    """Return whether an export of a study with a number of finished trials exists."""
    search = (read_json(path) or {}).get("search") or {}
    return (search.get("study"), search.get("trials"), bool(search.get(PROVISIONAL))) == (study, trials, False)


def connect(config: DictConfig, storage: str | None) -> tuple[BaseStorage | None, Tracker]:
    """Connect to remote services first: one of them may be unreachable, and nothing has been written yet."""
    track = partial(Tracker, config.tracking.uri, Path(config.outputs), config.tracking.experiment)
    remote = track() if config.tracking.uri is not None else None
    database = None if storage is None else open_database(storage)
    return database, remote or track()


def composed(config: DictConfig) -> str:
    """Return the composed configuration as YAML, without the passwords of its databases."""
    shown = config.copy()
    for part, name in (("study", "storage"), ("tracking", "uri")):
        if shown[part][name] is not None:
            shown[part][name] = without_password(str(shown[part][name]))
    return OmegaConf.to_yaml(shown, resolve=True)

"""The storage of studies: a journal file or a database, the lock of a folder, and the workers that share a study."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import sqlite3
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import optuna
import sqlalchemy
from omegaconf import DictConfig, OmegaConf
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial

from layerskip import ConfigError, SpeculativeConfig, Target
from layerskip.device.trial import first_line
from layerskip.export import PROVISIONAL
from layerskip.files import digest, read_json
from layerskip.models.environment import machine
from searches.app.checks import InputError, check_folder
from searches.app.interrupt import error_chain
from searches.connections import Result, Retry, RetryingStorage, is_unreachable, sqlite_file, sqlite_url, without_password
from searches.results import damage, drop_partial_line, locked_if_free, read_lines
from searches.study.finals import Finalist, Finals
from searches.study.study import StudySettings
from searches.tracking.tracker import Tracker
from searches.workers.pool import ALONE, WorkerPool, Workers

_JOURNAL = b'{"op_code":'
_REMEDY = "restore it, or keep the lines before to repeat the rest"
_LOCK_SECONDS = 10  # that SQLite waits for another process's transaction, before a line is printed
_PATIENCE = 600.0  # seconds that a database may be away for
_ATTEMPTS = 20
_CREATED_BY_OTHERS = ("already exists", "duplicate key", "UNIQUE constraint")
_PROXY_PORT = 13000  # Optuna's default
_PROXY_SECONDS = 10.0
"""Time in which a storage proxy must answer when a study is opened."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a study's folder, or refuse it if another process does. The kernel releases it with the process."""
    with locked_if_free(folder / "lock") as free:
        if not free:
            raise InputError(f"study.name: another process is running the study in {folder}")
        yield


class _Journal(JournalFileBackend):
    """A journal file that stays readable: a part of a line, which a full disk or a killed process leaves, is cut off."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), _JournalLock(path))
        self._path, self.line = path, 0

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        for self.line, entry in enumerate(super().read_logs(log_number_from), log_number_from + 1):
            yield entry

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        try:
            super().append_logs(logs)
        except OSError as error:  # of a write, it does not name the file
            raise OSError(error.errno, error.strerror, str(self._path)) from error


class _JournalLock(JournalFileOpenLock):
    """The lock of a journal: a file, since not every file system has symbolic links."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def acquire(self) -> bool:
        super().acquire()
        drop_partial_line(self._path)
        return True


def open_journal(path: Path, alone: bool) -> BaseStorage:
    """Open the storage of a study in a journal file.

    With ``alone``, no other process may write it, so that an existing lock was left by a killed process.

    Raises:
    ConfigError: a line before the last is damaged.
    InputError: the file cannot be written or is no journal of Optuna.
    """
    path = path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_journal(path)
        read_lines(path, "study.storage", _check_entry, _REMEDY)
        if alone:
            path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
        journal = _Journal(path)
    except OSError as error:
        raise InputError(f"study.storage: cannot write {path}: {error.strerror}") from error
    try:
        return JournalStorage(journal)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(damage(path, "study.storage", journal.line, _REMEDY)) from error


def _check_entry(line: bytes) -> None:
    entry = json.loads(line)
    if not (isinstance(entry["op_code"], int) and isinstance(entry["worker_id"], str)):
        raise TypeError


def _check_journal(path: Path) -> None:
    """Refuse a file that Optuna did not write, before its last line is repaired.

    An empty or cut-off first line is fine; a damaged one before others of Optuna is named later, with its number.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        first = file.readline()
        is_journal = first.startswith(_JOURNAL) or _JOURNAL.startswith(first) or b"\n" + _JOURNAL in b"\n" + file.read()
    if not is_journal:
        raise InputError(
            f"study.storage: {path} is no Optuna journal; a database is given by its URL, as in sqlite:///study.db"
        )


class _DatabaseRetry(Retry):
    """Repetition of calls to a database. What ends them is no defect of the program: it is said in one line.

    A full disk is an OSError. A database that is away for too long, damaged or cannot be written is an InputError.
    """

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
    if url.startswith("grpc://"):
        return RetryingStorage(_open_proxy(url), _DatabaseRetry(url))
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
    return RetryingStorage(get_storage(storage), retry)


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


JOINED = "works on study "
"""In the line that a worker prints when it joins, before the name of the study."""
_DATABASE = "study.db"
_JOURNAL_FILE = "journal.log"


def is_database(storage: str | None) -> bool:
    """Return whether a storage is a database or a server, on which several processes may work."""
    return storage is not None and "://" in storage


def storage_url(settings: StudySettings, folder: Path) -> str:
    """Return the URL of the database of a study that several processes work on: by default SQLite in the study's folder.

    Raises:
        InputError: the storage is a journal file.
    """
    if settings.storage is None and (folder / _JOURNAL_FILE).exists():
        raise InputError(f"study.name: {folder / _JOURNAL_FILE} is for one process; choose another name for several workers")
    if settings.storage is not None and not is_database(settings.storage):
        raise InputError(
            f"study.storage: {settings.storage} is a journal file, which is for one process; "
            "several workers need a database, such as sqlite:///study.db"
        )
    return settings.storage or sqlite_url(folder / _DATABASE)


def is_shared(settings: StudySettings, worker: int | None, folder: Path) -> bool:
    """Return whether other processes may work on a study: it has a numbered worker, a database, or had one in its folder."""
    in_folder = settings.storage is None and (folder / _DATABASE).exists()
    return worker is not None or in_folder or is_database(settings.storage)


def device_type(target: Target) -> str:
    """Return the type of the target's device, as far as speeds depend on it: a GPU, or a processor and its threads."""
    about = machine(target)
    return str(about["device_name"]) + (f", {about['threads']} threads" if about["device"] == "cpu" else "")


def place(outputs: Path, name: str, settings: StudySettings, device: str, shared: bool) -> tuple[str, Path]:
    """Return the name of a study in its storage, and its folder; devices of mixed types have a study and a folder each."""
    if shared and settings.devices == "mixed":
        name = f"{name}/{re.sub('[^A-Za-z0-9]+', '-', device).strip('-')}"
    check_folder("study.name", str(outputs / name))
    return name, outputs / name


@contextlib.contextmanager
def joined(
    name: str, folder: Path, settings: StudySettings, database: BaseStorage | None, device: str, shared: bool
) -> Iterator[tuple[BaseStorage, Workers]]:
    """Open the storage of a study, and join its workers if it may have others.

    The folder is locked if no other process may work on the study. ``database`` is None if the storage is a file in it.

    Raises:
        InputError: another process works on the study, which is in a file, or the study measures on another type of device.
    """
    if not shared:
        with locked(folder):
            yield open_journal(Path(settings.storage or folder / _JOURNAL_FILE), not settings.storage), ALONE
        return
    folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it warns of every connection that breaks
    storage = database or open_database(storage_url(settings, folder))
    with WorkerPool(storage, name, device) as pool:
        first = pool.share("device", lambda: device)
        if first != device:
            raise InputError(
                f"study.devices: study {name} measures on {first}, and this is {device}; "
                "study.devices=mixed keeps the results of each type apart"
            )
        print(f"worker {pool.name} {JOINED}{name}", flush=True)
        yield storage, pool


def share_finals(pool: Workers, trials: Sequence[FrozenTrial], measure: Callable[[Callable[[], None]], Finals]) -> Finals:
    """Return the finals of a study with some finished trials, which one of its workers measures and publishes.

    ``measure`` does both. It calls its argument from time to time, which raises an error if another worker does them now.
    """
    name = f"finals {digest([trial.number for trial in trials])[:16]}"

    def work() -> dict[str, Any]:
        finals = measure(partial(pool.check, name))
        fields = {field.name: getattr(finals, field.name) for field in dataclasses.fields(finals)}
        return fields | {"finalists": [vars(row) | {"config": row.config.to_dict()} for row in finals.finalists]}

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
    database = open_database(storage) if storage is not None and is_database(storage) else None
    return database, remote or track()


def composed(config: DictConfig) -> str:
    """Return the composed configuration as YAML, without the passwords of its databases."""
    shown = config.copy()
    for part, name in (("study", "storage"), ("tracking", "uri")):
        if shown[part][name] is not None:
            shown[part][name] = without_password(str(shown[part][name]))
    return OmegaConf.to_yaml(shown, resolve=True)

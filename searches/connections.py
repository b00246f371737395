"""Connections to databases and servers: URLs, and repetition of calls while they cannot be reached.

A restart or an outage of some minutes interrupts no worker. A call whose connection broke may have been carried out or not.
Calls that may not be carried out twice look first.
"""

from __future__ import annotations

import copy
import itertools
import random
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import optuna
import requests
import sqlalchemy
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from searches.app.checks import InputError
from searches.app.interrupt import defer_interrupt, error_chain

_PATIENCE = 600.0  # seconds
_LONGEST_PAUSE = 2.0  # seconds between two attempts
_RANDOM = random.SystemRandom()  # forked processes differ
_NONCE = "nonce"  # system attribute of a trial: identifies the call that created it

_CHANGES = ("set_trial_param", "set_trial_user_attr", "set_trial_system_attr", "set_trial_intermediate_value")
_UNAFFECTED = ("get_study_user_attrs", "get_study_system_attrs", "set_study_user_attr", "get_trial_system_attrs")
"""Calls whose results do not depend on those changes; Optuna reads a trial's system attributes before each constraint."""

Result = TypeVar("Result")


class Retry:
    """Repetition of calls while what they call cannot be reached; lines that begin with ``what`` say so.

    After ``patience`` seconds the error of a call is raised; those of the calls after it are raised at once.
    """

    def __init__(self, what: str, patience: float = _PATIENCE) -> None:
        self._what, self._patience = what, patience
        self._lost_since: float | None = None  # since when no call has succeeded

    def __call__(self, call: Callable[[], Result]) -> Result:
        pause, start = 0.1, time.monotonic()
        while True:
            try:
                with defer_interrupt():
                    result = call()
            except Exception as error:
                if not is_unreachable(error):
                    raise
                if self._lost_since is None:
                    self._lost_since, minutes = start, f"{self._patience / 60:.0f} minutes"
                    print(f"{self._what} cannot be reached; trying again for {minutes}", flush=True)
                # Calls of another thread may succeed in between; this one ends nevertheless.
                if time.monotonic() - min(start, self._lost_since or start) > self._patience:
                    raise
                time.sleep(pause * _RANDOM.uniform(0.5, 1.0))  # processes do not all come back at the same moment
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                if self._lost_since is not None:
                    self._lost_since = None
                    print(f"{self._what} is back", flush=True)
                return result


def is_unreachable(error: BaseException) -> bool:
    """Return whether a call failed because a database, or a server, could not be reached for the moment."""
    return any(_is_of_connection(link) for link in error_chain(error))


def _is_of_connection(error: BaseException) -> bool:
    origin = error.orig if isinstance(error, sqlalchemy.exc.DBAPIError) else error
    if isinstance(origin, sqlite3.Error):  # a file: nothing but a lock of another process passes by itself
        return "database is locked" in str(origin)
    if isinstance(error, sqlalchemy.exc.DBAPIError):
        passing = (sqlalchemy.exc.OperationalError, sqlalchemy.exc.InterfaceError)
        return error.connection_invalidated or isinstance(error, passing)
    return isinstance(error, (ConnectionError, requests.exceptions.ConnectionError, requests.exceptions.Timeout))


class _Waiting(threading.local):
    """The trial of a thread whose changes are joined, and those that wait."""

    def __init__(self) -> None:
        self.trial: int | None = None
        self.changes: list[Callable[[], None]] = []


_Storage: Any = object  # for mypy, which knows no methods of __getattr__


class RetryingStorage(_Storage):  # type: ignore[misc]
    """A storage of Optuna whose calls are repeated while its database cannot be reached.

    In the context that ``transaction`` makes, all changes of the thread are one transaction. ``signature`` holds the user
    attributes of trials that are created without any.
    """

    def __init__(
        self, storage: BaseStorage, retry: Retry, transaction: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self.signature: dict[str, str] = {}
        self._storage, self._retry, self._transaction, self._waiting = storage, retry, transaction, _Waiting()
        self.is_alone = False  # nobody else changes trials, which are therefore read again after own changes only
        self._read: dict[int, list[FrozenTrial]] = {}  # all trials of a study

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a method that calls the storage's until it is reached; changes of a joined trial wait for the next read."""
        own = getattr(self._storage, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            method = partial(own, *args, **kwargs)
            if name in _CHANGES and args[:1] == (self._waiting.trial,):
                self._waiting.changes.append(method)
                return None
            if name not in _UNAFFECTED:
                self._write_changes()
            try:
                return self._retry(method)
            finally:
                if not name.startswith("get_") and name not in _UNAFFECTED:
                    self._read.clear()

        return call

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        self._write_changes()
        if (trials := self._read.get(study_id)) is None:
            trials = self._retry(partial(self._storage.get_all_trials, study_id, deepcopy=False))
            if self.is_alone:
                self._read[study_id] = trials
        chosen = [trial for trial in trials if states is None or trial.state in states]
        return copy.deepcopy(chosen) if deepcopy else chosen

    def join_changes(self, trial_id: int) -> None:
        """Let changes of a trial, from this thread, wait until it reads or ends one, for one transaction of all."""
        self._waiting.trial = trial_id

    @defer_interrupt()
    def _write_changes(self) -> None:
        changes = self._waiting.changes

        def write() -> None:
            with self._transaction():
                for change in changes:
                    change()

        if changes:
            self._retry(write)
            self._read.clear()
            changes.clear()  # after a success alone: a change may be repeated, but not lost

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Create a trial, once: a repeated call first looks for the trial of the call before."""
        signed = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=dict(self.signature))
        template = copy.copy(template_trial or signed)
        nonce = uuid.uuid4().hex
        template.system_attrs = template.system_attrs | {_NONCE: nonce}
        attempts = itertools.count()
        self._write_changes()

        def create() -> int:
            if next(attempts):
                for trial in self._storage.get_all_trials(study_id, deepcopy=False):
                    if trial.system_attrs.get(_NONCE) == nonce:
                        return self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
            return self._storage.create_new_trial(study_id, template)

        created: int = self._retry(create)
        self._read.clear()
        return created

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """Set the state of a trial; a repeated call succeeds if the trial was finished like this."""
        attempts = itertools.count()
        self._write_changes()

        def update() -> bool:
            is_repeated = next(attempts) > 0
            try:
                return self._storage.set_trial_state_values(trial_id, state, values)
            except UpdateFinishedTrialError:
                stored = self._storage.get_trial(trial_id)
                if is_repeated and stored.state == state and (values is None or stored.values == list(values)):
                    return True
                raise

        try:
            updated: bool = self._retry(update)
        finally:
            self._read.clear()
        return updated


def sqlite_url(file: Path) -> str:
    """Return the URL of an SQLite database in a file; SQLAlchemy 2.0 has none for a path with a question mark."""
    path = str(file.resolve())
    # MLflow also creates the folder that follows "sqlite:///", as it stands there; with the driver's name it does not.
    quoted = "sqlite+pysqlite:///" + path.replace("%", "%25").replace("?", "%3F")
    for url in (f"sqlite:///{path}", quoted):
        if sqlite_file(url) == Path(path):
            return url
    raise InputError(f"outputs: the path of a database cannot have a question mark here, as in {path}; rename the folder")


def sqlite_file(url: str) -> Path | None:
    """Return the file of an SQLite database; None for another one, and for one in memory."""
    parts = _parts(url)
    if parts is None or parts.get_backend_name() != "sqlite" or parts.database in (None, "", ":memory:"):
        return None
    return Path(str(parts.database))


def without_password(url: str) -> str:
    parts = _parts(url)
    return url if parts is None or parts.password is None else parts.render_as_string(hide_password=True)


def _parts(url: str) -> sqlalchemy.URL | None:
    try:
        return sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError):  # of a port that is no number
        return None

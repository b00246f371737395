"""The tracking store: its experiment, and writes that are kept when it fails, and written when it takes them again."""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
import sqlite3
import time
import traceback
import uuid
from collections.abc import Callable, Hashable
from pathlib import Path

from mlflow.entities import Experiment, LifecycleStage
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from searches.app.checks import InputError
from searches.app.interrupt import defer_interrupt, error_chain, is_interrupt
from searches.connections import Retry, is_unreachable, sqlite_file, sqlite_url, without_password
from searches.results import exclusive

_ARTIFACTS, _DRAFT = "mlartifacts", ".new"
PATIENCE = 10.0  # seconds after the beginning of an outage for which the end of a program waits
_QUICK = 1.0  # seconds of a failed attempt that is repeated at once
_SHARE = 10  # a longer one is repeated after so many times its seconds, so that a store that hangs costs a tenth at most
_LONGEST = 20.0  # seconds after which a failing attempt leaves the other writes for the next
_PAUSE = 0.5  # seconds between two attempts at the end


def open_experiment(uri: str | None, folder: Path, name: str) -> tuple[MlflowClient, str, str]:
    """Open an experiment of a store, None for a SQLite store in ``folder``; both are created, once, if they do not exist.

    Returns the client, the URI of the store, and the identifier of the experiment. A store that cannot be opened and an
    experiment that was deleted are an :class:`InputError`.
    """
    is_own = uri is None
    field = "outputs" if is_own else "tracking.uri"
    if uri is None:
        folder.mkdir(parents=True, exist_ok=True)
        uri = sqlite_url(folder / "mlflow.db")
    if (file := sqlite_file(uri)) is not None and not file.parent.is_dir():
        file = None  # MLflow says that there is no such folder
    artifacts = None if file is None else (file.parent / _ARTIFACTS).resolve().as_uri()  # by default, in the working folder

    def find() -> tuple[MlflowClient, Experiment]:
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            try:
                experiment = client.get_experiment(client.create_experiment(name, artifact_location=artifacts))
            except MlflowException:  # another process may have created it
                if (experiment := client.get_experiment_by_name(name)) is None:
                    raise
        if is_own and file is not None and artifacts not in (None, experiment.artifact_location):
            _move_artifacts(file, artifacts)
        return client, experiment

    try:
        with contextlib.nullcontext() if file is None else exclusive(file):
            if file is not None and not file.exists():
                _create_database(file)
            # Nothing but a lock of another program passes by itself.
            client, experiment = find() if file is None else Retry(f"{field}: {file}, which another program locked,")(find)
    except InputError:  # names what it is about
        raise
    except Exception as error:  # whatever the store's driver raises
        raise InputError(f"{field}: cannot open {without_password(uri)}: {reason(error, uri)}") from error
    if experiment.lifecycle_stage != LifecycleStage.ACTIVE:
        place = shlex.quote(without_password(uri))
        raise InputError(
            f"tracking.experiment: {name} was deleted; name another, or restore it: "
            f"MLFLOW_TRACKING_URI={place} mlflow experiments restore -x {experiment.experiment_id}"
        )
    return client, uri, str(experiment.experiment_id)


def reason(error: BaseException, uri: str) -> str:
    """Return one line that says why a store failed: what the system or the database says, if that is the cause."""
    cause = next((link for link in reversed(error_chain(error)) if isinstance(link, (OSError, sqlite3.Error))), error)
    text = str(cause) or type(cause).__name__
    return text.splitlines()[0].replace(uri, without_password(uri))


def _move_artifacts(file: Path, artifacts: str) -> None:
    """Correct the absolute URIs of artifacts in the store of an outputs folder that was moved or copied."""
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        rows = database.execute(
            "SELECT artifact_location FROM experiments WHERE artifact_location LIKE ? AND artifact_location != ?",
            (f"file:%/{_ARTIFACTS}", artifacts),
        )
        for (before,) in set(rows):
            database.execute("UPDATE experiments SET artifact_location = ? WHERE artifact_location = ?", (artifacts, before))
            database.execute(
                "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?) WHERE substr(artifact_uri, 1, ?) = ?",
                (artifacts, len(before) + 1, len(before) + 1, f"{before}/"),
            )


def _create_database(file: Path) -> None:
    """Create MLflow's tables in a file that gets its name at the end, so that a kill leaves no half of them."""
    for left in file.parent.glob(f"{glob.escape(file.name)}.*{_DRAFT}"):  # by a process that was killed
        left.unlink(missing_ok=True)
    draft = file.with_name(f"{file.name}.{uuid.uuid4().hex}{_DRAFT}")  # MLflow keeps a connection to each name
    MlflowClient(sqlite_url(draft)).get_experiment("0")
    try:
        with contextlib.suppress(FileExistsError):  # another program may have created one since
            os.link(draft, file)
    except OSError:  # a file system without links
        draft.replace(file)
    draft.unlink(missing_ok=True)


class Outbox:
    """The writes that a store has not taken yet. An error of the store is printed once, not raised."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._writes: dict[Hashable, Callable[[], object]] = {}
        self._lost_since: float | None = None
        self._next_attempt = 0.0

    def put(self, key: Hashable, write: Callable[[], object]) -> None:
        """Keep a write, which can be repeated, in the place of an earlier one of the same key."""
        self._writes[key] = write

    def send(self, patience: float | None = None) -> None:
        """Try all writes, for ``patience`` seconds of an outage; None tries once, unless the store is slow to fail."""
        if patience is None and time.monotonic() < self._next_attempt:
            return
        while self._attempt() and time.monotonic() < (self._lost_since or 0.0) + (patience or 0.0):
            time.sleep(_PAUSE)

    @defer_interrupt()
    def _attempt(self) -> bool:
        """Try all writes; return whether the store cannot be reached."""
        start, failure = time.monotonic(), None
        for key, write in list(self._writes.items()):
            try:
                write()
                del self._writes[key]
            except Exception as error:
                if is_interrupt(error) or not is_of_store(error):
                    raise
                failure = error
                if is_unreachable(error) or time.monotonic() - start > _LONGEST:
                    break
        if failure is None:
            if self._lost_since is not None:
                print("tracking.uri: the store is back; nothing is missing in it", flush=True)
            self._lost_since = None
            return False
        if self._lost_since is None:
            self._lost_since = start
            print(
                f"tracking.uri: cannot write to {without_password(self._uri)}: {reason(failure, self._uri)}; "
                "the program goes on, and what is missing is written when the store is back, or by the same command",
                flush=True,
            )
        seconds = time.monotonic() - start
        self._next_attempt = start + seconds * (1 + _SHARE) if seconds > _QUICK else 0.0
        return is_unreachable(failure)


def is_of_store(error: BaseException) -> bool:
    """Return whether an error comes from a tracking store, its artifacts, or the way to it; others are defects."""
    frames = traceback.walk_tb(error.__traceback__)
    return is_unreachable(error) or any(str(frame.f_globals.get("__name__")).startswith("mlflow.") for frame, _ in frames)

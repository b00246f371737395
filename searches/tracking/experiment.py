"""The MLflow experiment that runs are written to."""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
import sqlite3
import uuid
from pathlib import Path

from mlflow.entities import LifecycleStage
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from searches.app.checks import InputError
from searches.app.file_lock import exclusive
from searches.app.interrupt import error_chain
from searches.app.urls import sqlite_file, sqlite_url, without_password

_ARTIFACTS, _DRAFT = "mlartifacts", ".new"


def open_experiment(uri: str | None, folder: Path, name: str) -> tuple[MlflowClient, str, str]:
    """Open an experiment, and create it if it does not exist; processes that start at the same time create one.

    Args:
        uri: of the tracking store; None creates a SQLite store in ``folder``.
        folder: of a store that is created.
        name: of the experiment.

    Returns:
        The client, the URI of the store, and the identifier of the experiment.

    Raises:
        InputError: the store cannot be opened, or the experiment was deleted.
    """
    is_own = uri is None
    field = "outputs" if is_own else "tracking.uri"
    if uri is None:
        folder.mkdir(parents=True, exist_ok=True)
        uri = sqlite_url(folder / "mlflow.db")
    file = _file_of(uri)
    artifacts = None if file is None else (file.parent / _ARTIFACTS).resolve().as_uri()  # by default, in the working folder
    try:
        with contextlib.nullcontext() if file is None else exclusive(file):
            if file is not None and not file.exists():
                _create_database(file)
            client = MlflowClient(uri)
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                try:
                    created = client.create_experiment(name, artifact_location=artifacts)
                    return client, uri, str(created)
                except MlflowException:
                    experiment = client.get_experiment_by_name(name)  # another process may have created it
                    if experiment is None:
                        raise
            if is_own and file is not None and artifacts not in (None, experiment.artifact_location):
                _move_artifacts(file, artifacts)
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


def _file_of(uri: str) -> Path | None:
    """Return the file of a SQLite store whose folder exists; None for any other store."""
    file = sqlite_file(uri)
    return file if file is not None and file.parent.is_dir() else None


def _move_artifacts(file: Path, artifacts: str) -> None:
    """Correct the places of artifacts in the store of an outputs folder that was moved or copied since it was written.

    MLflow stores them as absolute URIs, and would write into the folder of that time.

    Args:
        file: of the store.
        artifacts: the URI of the folder that they are in now.
    """
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
    """Create MLflow's tables in a new file that gets its name when all are there.

    MLflow creates them by tens of migrations. A process that is killed between two of them leaves a database that MLflow
    cannot open any more.
    """
    for left in file.parent.glob(f"{glob.escape(file.name)}.*{_DRAFT}"):  # by a process that was killed
        left.unlink(missing_ok=True)
    draft = file.with_name(f"{file.name}.{uuid.uuid4().hex}{_DRAFT}")  # MLflow keeps a connection to each name
    MlflowClient(sqlite_url(draft)).get_experiment("0")
    try:
        os.link(draft, file)  # another program may have created one since
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        draft.replace(file)
    draft.unlink(missing_ok=True)

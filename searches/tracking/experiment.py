"""The MLflow experiment that runs are written to."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import uuid
from pathlib import Path

from mlflow.entities import LifecycleStage
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from searches.app.checks import InputError
from searches.app.file_lock import exclusive
from searches.app.interrupt import error_chain
from searches.app.urls import without_password

_SQLITE, _DRAFT = "sqlite:///", ".new"


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
    artifacts, field = None, "tracking.uri" if uri is not None else "outputs"
    if uri is None:
        folder.mkdir(parents=True, exist_ok=True)
        uri, artifacts = f"{_SQLITE}{(folder / 'mlflow.db').resolve()}", (folder / "mlartifacts").resolve().as_uri()
    file = _file_of(uri)
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
    except InputError:  # names what it is about
        raise
    except Exception as error:  # whatever the store's driver raises
        raise InputError(f"{field}: cannot open {without_password(uri)}: {reason(error, uri)}") from error
    if experiment.lifecycle_stage != LifecycleStage.ACTIVE:
        raise InputError(
            f"tracking.experiment: {name} was deleted; name another, or restore it: "
            f"MLFLOW_TRACKING_URI={without_password(uri)} mlflow experiments restore -x {experiment.experiment_id}"
        )
    return client, uri, str(experiment.experiment_id)


def reason(error: BaseException, uri: str) -> str:
    """Return one line that says why a store failed: what the system or the database says, if that is the cause."""
    cause = next((link for link in reversed(error_chain(error)) if isinstance(link, (OSError, sqlite3.Error))), error)
    text = str(cause) or type(cause).__name__
    return text.splitlines()[0].replace(uri, without_password(uri))


def _file_of(uri: str) -> Path | None:
    """Return the file of a SQLite store whose folder exists; None for any other store."""
    file = Path(uri.removeprefix(_SQLITE).partition("?")[0])
    return file if uri.startswith(_SQLITE) and file.name and file.parent.is_dir() else None


def _create_database(file: Path) -> None:
    """Create MLflow's tables in a new file that gets its name when all are there.

    MLflow creates them by tens of migrations. A process that is killed between two of them leaves a database that MLflow
    cannot open any more.
    """
    for left in file.parent.glob(f"{file.name}.*{_DRAFT}"):  # by a process that was killed
        left.unlink(missing_ok=True)
    draft = file.with_name(f"{file.name}.{uuid.uuid4().hex}{_DRAFT}")  # MLflow keeps a connection to each name
    MlflowClient(f"{_SQLITE}{draft}").get_experiment("0")
    try:
        os.link(draft, file)  # another program may have created one since
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        draft.replace(file)
    draft.unlink(missing_ok=True)

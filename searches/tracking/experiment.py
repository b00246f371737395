"""The MLflow experiment that runs are written to."""

from __future__ import annotations

import contextlib
from pathlib import Path

from mlflow.entities import LifecycleStage
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from searches.app.checks import InputError
from searches.app.file_lock import exclusive
from searches.app.urls import without_password

_SQLITE = "sqlite:///"


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
    artifacts, file = None, (folder / "mlflow.db").resolve()
    if uri is None:
        folder.mkdir(parents=True, exist_ok=True)
        uri, artifacts = f"{_SQLITE}{file}", (folder / "mlartifacts").resolve().as_uri()
    try:
        with exclusive(file) if artifacts else contextlib.nullcontext():
            if artifacts and not file.exists():
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
    except Exception as error:  # whatever the store's driver raises
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"tracking.uri: cannot open {without_password(uri)}: {reason}") from error
    if experiment.lifecycle_stage != LifecycleStage.ACTIVE:
        raise InputError(
            f"tracking.experiment: {name} was deleted; name another, or restore it: "
            f"MLFLOW_TRACKING_URI={without_password(uri)} mlflow experiments restore -x {experiment.experiment_id}"
        )
    return client, uri, str(experiment.experiment_id)


def _create_database(file: Path) -> None:
    """Create MLflow's tables in a new file that gets its name when all are there.

    MLflow creates them by tens of migrations. A process that is killed between two of them leaves a database that MLflow
    cannot open any more.
    """
    draft = file.with_name(f"{file.name}.new")
    draft.unlink(missing_ok=True)
    MlflowClient(f"{_SQLITE}{draft}").get_experiment("0")
    draft.replace(file)

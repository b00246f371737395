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
    artifacts = None
    if uri is None:
        folder.mkdir(parents=True, exist_ok=True)
        uri, artifacts = f"sqlite:///{(folder / 'mlflow.db').resolve()}", (folder / "mlartifacts").resolve().as_uri()
    try:
        with exclusive(folder / "mlflow.db") if artifacts else contextlib.nullcontext():
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

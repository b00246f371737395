"""One run of the tracking store, which users may delete while a program writes to it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, Run, ViewType
from mlflow.tracking import MlflowClient

from layerskip.files import atomic_write, read_json

PARENT = "mlflow.parentRunId"
"""The tag by which MLflow nests a run below another."""
_METRICS = 999  # metrics per batch: a store takes at most 1000, and this divides into whole fits
_PARAMS = 100  # parameters per batch: a store takes no more
_LARGEST = 1e300  # stores turn larger numbers into others


class Store:
    """An experiment of a tracking store.

    Args:
        client: the client of the store.
        experiment: the identifier of the experiment.
        folder: for metrics that the store has not taken, and which nothing else keeps.
    """

    def __init__(self, client: MlflowClient, experiment: str, folder: Path) -> None:
        self.client, self.experiment, self.folder = client, experiment, folder

    def search(self, query: str, view: int = ViewType.ACTIVE_ONLY) -> list[Run]:
        """Return all runs that a query finds, the latest first."""
        runs: list[Run] = []
        token = None
        while True:
            page = self.client.search_runs([self.experiment], query, view, max_results=1000, page_token=token)
            runs += page
            if not (token := page.token):
                return runs

    def create(self, name: str, tags: Mapping[str, Any], start: int | None = None) -> str:
        """Create a run that started at a time, in milliseconds; return its identifier."""
        return str(self.client.create_run(self.experiment, start, dict(tags), run_name=name).info.run_id)

    def log(self, run_id: str, metrics: Sequence[Metric], params: Mapping[str, str] | None = None) -> None:
        """Log metrics and parameters together, in as few batches as a store takes."""
        given = [Param(key, value) for key, value in (params or {}).items()]
        while metrics or given:
            self.client.log_batch(run_id, metrics=metrics[:_METRICS], params=given[:_PARAMS])
            metrics, given = metrics[_METRICS:], given[_PARAMS:]

    def left(self, study: str) -> Iterator[dict[str, Any]]:
        """Yield the fields of nested runs of a study with metrics that an earlier process could not log."""
        for path in sorted(self.folder.glob("*.json")):
            if (fields := read_json(path)) is not None and fields["parent"] == study:
                yield fields


def metrics_now(metrics: Mapping[str, float], step: int = 0) -> list[Metric]:
    """Return metrics of this moment. Infinite values, which stores turn into numbers, become NaN."""
    now = int(time.time() * 1000)
    return [Metric(k, float(v) if abs(v) < _LARGEST else math.nan, now, step) for k, v in metrics.items()]


class StudyRun:
    """The run of a study, or of a part of one. It is found, or made again after it was deleted, when it is written to.

    Args:
        store: holds the run.
        name: the name of the run.
        identity: with the role, distinguishes it from other runs.
        role: the purpose of the run.
        params: the parameters of the run.
        tags: the tags of the run.
        metrics: the metrics of a new run.
        parent: the run that it is nested below.

    Attributes:
        id: the identifier; None until the store was reached.
        texts: artifacts of the run, by name.
        left: metrics that the store has not taken.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        identity: str,
        role: str,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        metrics: Mapping[str, float],
        parent: StudyRun | None = None,
    ) -> None:
        self.id: str | None = None
        self.texts: dict[str, str] = {}
        self._file = store.folder / f"{role}-{identity}.json"
        stored = read_json(self._file) or {"metrics": []}
        self.left = [Metric(*fields) for fields in stored["metrics"]]
        self.name, self.identity, self.role, self.params, self.parent = name, identity, role, params, parent
        self._store, self._metrics, self._is_checked = store, metrics, False
        self._logged: tuple[str, dict[str, str]] | None = None  # the run that has texts, and which
        self._tags = {"study": name, "study_id": identity, "role": role} | dict(tags)
        self._query = f"tags.study_id = '{identity}' and tags.role = '{role}'"

    def check_again(self) -> None:
        """Look for the run before the next write."""
        self._is_checked = False
        if self.parent is not None:
            self.parent.check_again()

    def current(self) -> str:
        """Return the identifier of the run, which is made again if it was deleted."""
        if self.id is None or not self._is_checked:
            tags = self._tags if self.parent is None else self._tags | {PARENT: self.parent.current()}
            self.id, self._is_checked = self._find(tags), True
        return self.id

    def log_texts(self) -> None:
        """Log the texts that the run does not have."""
        wanted = self.current(), dict(self.texts)
        if self._logged != wanted:
            for name, text in self.texts.items():
                self._store.client.log_text(wanted[0], text, name)
            self._logged = wanted

    def log_left(self) -> None:
        """Log the metrics that the store has not taken."""
        self._store.log(self.current(), self.left)
        self.left = []
        self._file.unlink(missing_ok=True)

    def keep_left(self) -> None:
        """Write the metrics that the store has not taken to a file, for the next start."""
        if self.left:
            fields: dict[str, Any] = {name: getattr(self, name) for name in ("name", "identity", "role", "params")}
            fields["parent"] = None if self.parent is None else self.parent.identity
            fields["metrics"] = [(metric.key, metric.value, metric.timestamp, metric.step) for metric in self.left]
            with atomic_write(self._file) as partial:
                partial.write_text(json.dumps(fields), encoding="utf-8")

    def doubled(self) -> list[str]:
        """Return the further runs of the study, which processes made that missed a deleted one at the same time."""
        return [run.info.run_id for run in self._store.search(self._query)[:-1]]

    def _find(self, tags: Mapping[str, str]) -> str:
        client, found = self._store.client, self._store.search(self._query)
        if self.id is not None and self.id in [run.info.run_id for run in found[-1:]]:
            return self.id
        deleted = self._store.search(self._query, ViewType.DELETED_ONLY)
        if found:
            run_id = str(found[-1].info.run_id)
            client.update_run(run_id, status="RUNNING")
        else:
            run_id = self._store.create(self.name, tags)
            if deleted:
                print(f"tracking.uri: the run of {self.name} was deleted; it is made again", flush=True)
        if not found or not found[-1].data.params:  # a failure may have come before them
            self._store.log(run_id, metrics_now(self._metrics), self.params)
        for before in deleted:
            for child in self._store.search(f"tags.`{PARENT}` = '{before.info.run_id}'"):
                client.set_tag(child.info.run_id, PARENT, run_id)
        return run_id

"""How does MLflow mirror a study? One run per study, one nested run per finished trial, and never two of the same.

The study is the truth and MLflow its picture: a trial's run is written from what the study holds, in one batch, after the
trial is finished. What a kill left missing or half written is written again when the study is resumed.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import LifecycleStage, Metric, Param, Run, RunTag
from mlflow.tracking import MlflowClient
from optuna.trial import FrozenTrial

from layerskip import SpeculativeConfig, mask
from searches.app.checks import InputError
from searches.app.interrupt import is_interrupt, undisturbed
from searches.app.urls import without_password
from searches.tracking.names import DRIFTED, PREDICTED

_METRICS = (
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
    "speedup_low",
    "speedup_high",
    "acceptance_rate",
    "tokens_per_round",
    "draft_share",
    "peak_memory_bytes",
    "prefill_seconds",
    "decode_seconds",
)
_FIT_METRICS = ("fit_seconds", "agreement_empty", "agreement_bridged")
_AT_ONCE = 999  # metrics of a batch, of which a store takes a thousand: whole fits
_LARGEST = 1e300


class Tracker:
    """Writes one study's runs.

    Args:
        uri: of the tracking store; None makes a SQLite store in ``folder``.
        folder: where the default store and its artifacts lie.
        experiment: the experiment's name.

    Raises:
        InputError: the store cannot be reached.
    """

    def __init__(self, uri: str | None, folder: Path, experiment: str) -> None:
        local = uri is None
        if local:
            folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        self.uri = str(uri)
        try:
            self._client = MlflowClient(self.uri)
            found = self._client.get_experiment_by_name(experiment)
            if found is None:
                artifacts = (folder / "mlartifacts").resolve().as_uri() if local else None
                self._experiment = self._client.create_experiment(experiment, artifact_location=artifacts)
            else:
                self._experiment = found.experiment_id
        except Exception as error:  # the client raises whatever its store's driver does
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise InputError(f"tracking.uri: cannot open {without_password(self.uri)}: {reason}") from error
        if found is not None and found.lifecycle_stage != LifecycleStage.ACTIVE:
            raise InputError(
                f"tracking.experiment: {experiment} was deleted; name another, or restore it: "
                f"MLFLOW_TRACKING_URI={without_password(self.uri)} mlflow experiments restore -x {found.experiment_id}"
            )

    @undisturbed()
    def open_study(
        self, name: str, identity: str, params: Mapping[str, Any], tags: Mapping[str, Any], role: str = "study"
    ) -> str:
        """Open the run of a study, or go on with it.

        Args:
            name: the study's.
            identity: tells it from others of that name.
            params: settings, flat; repeated on every trial's run, since MLflow's filters drop parents.
            tags: what describes the study run alone.
            role: what it is, if not a study.

        Returns:
            Its run id.
        """
        self._study, self._identity = name, identity
        self._params = {key: str(value)[:500] for key, value in params.items()}
        runs = self._search(f"tags.study_id = '{identity}' and tags.role = '{role}'")
        if runs:
            self.run_id = runs[0].info.run_id
            self._client.update_run(self.run_id, status="RUNNING")
        else:
            own = {"study": name, "study_id": identity, "role": role} | {key: str(value) for key, value in tags.items()}
            self.run_id = self._client.create_run(self._experiment, tags=own, run_name=name).info.run_id
            self._client.log_batch(self.run_id, params=[Param(k, v) for k, v in self._params.items()])
        self._recorded = self._drop_unfinished()
        return str(self.run_id)

    def nested(self, name: str, identity: str, params: Mapping[str, Any], role: str) -> Tracker:
        """The same for a piece of work below the study's run, which has a run of its own; arguments as of ``open_study``."""
        below = copy.copy(self)
        below.open_study(name, identity, params, {"mlflow.parentRunId": self.run_id}, role)
        return below

    def _drop_unfinished(self) -> set[int]:
        """The trials that have a whole run; half-written ones are deleted."""
        recorded = set()
        for run in self._search(f"tags.study_id = '{self._identity}' and tags.role = 'trial'"):
            if run.info.status == "RUNNING":
                self._client.delete_run(run.info.run_id)
            else:
                recorded.add(int(run.data.tags["trial_number"]))
        return recorded

    @undisturbed()
    def record(self, trial: FrozenTrial) -> None:
        """Write a finished trial's run, unless it is there already."""
        if trial.number in self._recorded:
            return
        config = SpeculativeConfig.from_dict(trial.user_attrs["config"])
        measured = trial.user_attrs.get("measurement", {})
        tags = {
            "mlflow.parentRunId": self.run_id,
            "study": self._study,
            "study_id": self._identity,
            "role": "trial",
            "trial_number": str(trial.number),
            "trial_state": trial.state.name,
            "mask": config.mask,
            "config": config.label(),
            "losslessness": measured.get("losslessness", {}).get("verdict", "unchecked"),
        }
        if "reason" in trial.user_attrs:
            tags["reason"] = trial.user_attrs["reason"]
        run = self._client.create_run(
            self._experiment, _milliseconds(trial.datetime_start), tags, run_name=f"trial {trial.number}"
        )
        metrics = {name: measured[name] for name in _METRICS if name in measured}
        if trial.user_attrs.get(PREDICTED) is not None:
            metrics[PREDICTED] = trial.user_attrs[PREDICTED]
        metrics["seconds"] = trial.user_attrs["seconds"]
        metrics[DRIFTED] = trial.user_attrs.get(DRIFTED, 0)
        for position, rate in enumerate(measured.get("acceptance_by_position", ())):
            metrics[f"acceptance_at_{position + 1:02d}"] = rate
        self.log(run.info.run_id, metrics, _summary(config) | self._params)
        if "table" in trial.user_attrs:
            self._client.log_table(run.info.run_id, trial.user_attrs["table"], "prompts.json")
        self._client.set_terminated(run.info.run_id, end_time=_milliseconds(trial.datetime_complete))
        self._recorded.add(trial.number)

    @undisturbed()
    def log_benchmark(self, record: Mapping[str, Any], texts: Mapping[str, str], file: Path) -> None:
        """Write a benchmark: one run, and one nested run per contender.

        Args:
            record: as ``searches.benchmark`` writes it.
            texts: artifacts by name.
            file: the record's own file.
        """
        tags = {"role": "benchmark", "date": record["date"]} | {k: str(v) for k, v in record["environment"].items()}
        self.run_id = self._client.create_run(self._experiment, tags=tags, run_name="benchmark").info.run_id
        params = {key: str(record["target"][key]) for key in ("name", "dtype")}
        for name, found in record["results"].items():
            own = {"mlflow.parentRunId": self.run_id, "role": "contender", "contender": name}
            child = self._client.create_run(self._experiment, tags=own, run_name=name).info.run_id
            metrics = {metric: found[metric] for metric in (*_METRICS, "drafter_bytes")}
            self.log(child, metrics, params | {"lossless": str(found["lossless"])})
            self._client.set_terminated(child)
        for name, text in texts.items():
            self.log_text(text, name)
        self.log_file(file)
        self.finish()

    @undisturbed()
    def log(self, run_id: str, metrics: Mapping[str, float], params: Mapping[str, str] | None = None, step: int = 0) -> None:
        """Write metrics and parameters in one batch; what is not finite is left out, as stores turn it into numbers."""
        now = int(time.time() * 1000)
        values = [Metric(k, float(v), now, step) for k, v in metrics.items() if math.isfinite(v) and abs(v) < _LARGEST]
        self._client.log_batch(run_id, metrics=values, params=[Param(k, v) for k, v in (params or {}).items()])

    @undisturbed()
    def log_fits(self, fits: Sequence[Mapping[str, Any]]) -> None:
        """Write what bridges were fitted: metrics with a step for each fit, in one batch, and a table that names them.

        Args:
            fits: all so far, in one order: ``fit_seconds``, ``agreement_empty``, ``agreement_bridged``, and what names them.
                Those that are written already are not written again; one that is empty keeps its place.
        """
        known = {metric.step for metric in self._client.get_metric_history(self.run_id, _FIT_METRICS[0])}
        new = [(step, fit) for step, fit in enumerate(fits) if fit and step not in known]
        now = int(time.time() * 1000)
        values = [Metric(name, float(fit[name]), now, step) for step, fit in new for name in _FIT_METRICS]
        for first in range(0, len(values), _AT_ONCE):
            self._client.log_batch(self.run_id, metrics=values[first : first + _AT_ONCE])
        if new:
            self._client.log_text(self.run_id, json.dumps(fits, indent=1), "fits.json")

    @undisturbed()
    def tag(self, tags: Mapping[str, Any]) -> None:
        """Put tags on the study's run."""
        self._client.log_batch(self.run_id, tags=[RunTag(key, str(value)) for key, value in tags.items()])

    @undisturbed()
    def log_text(self, text: str, name: str) -> None:
        """Keep a text as an artifact of the study's run."""
        self._client.log_text(self.run_id, text, name)

    @undisturbed()
    def log_file(self, path: Path, folder: str | None = None) -> None:
        """Keep a file as an artifact of the study's run, in a folder of its artifacts."""
        self._client.log_artifact(self.run_id, str(path), folder)

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Close the study's run behind a block, whatever ends it."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                self.finish("KILLED" if is_interrupt(error) else "FAILED")
            raise
        self.finish()

    @undisturbed()
    def finish(self, status: str = "FINISHED") -> None:
        """Close the study's run: ``FINISHED``, ``KILLED`` where it was interrupted, ``FAILED``."""
        self._client.set_terminated(self.run_id, status)

    def _search(self, query: str) -> list[Run]:
        found: list[Run] = []
        token = None
        while True:
            page = self._client.search_runs([self._experiment], query, max_results=1000, page_token=token)
            found += page
            if not (token := page.token):
                return found


def _summary(config: SpeculativeConfig) -> dict[str, str]:
    """A configuration in numbers: MLflow's plots cut long labels, so the mask itself is a tag."""
    fields: dict[str, Any] = {
        key: value for key, value in config.to_dict().items() if key not in ("mask", "stop", "members")
    }
    for place, member in enumerate(config.members):
        fields |= {f"member_{place}_{key}": value for key, value in _summary(member).items()}
    if config.kind == "layer_skip":
        fields["skipped_attention"], fields["skipped_mlp"] = mask.count(config.mask)
    if "stop" in config.to_dict():
        fields |= {"stop": config.stop.kind}
        if config.stop.kind != "length":
            fields["threshold"] = config.stop.threshold
    return {key: str(value) for key, value in fields.items()}


def _milliseconds(moment: Any) -> int | None:
    return None if moment is None else int(moment.timestamp() * 1000)

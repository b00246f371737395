"""MLflow runs that mirror a study: one run per study and one nested run per finished trial, without duplicates.

The study is the source of truth. A trial's run is written from the study in one batch after the trial has finished. Runs
that a killed process left out or incomplete are written when the study is resumed.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, Run, RunTag
from optuna.trial import FrozenTrial

from layerskip import SpeculativeConfig
from searches.app.interrupt import defer_interrupt, is_interrupt
from searches.app.retry import Retry, is_unreachable
from searches.tracking.experiment import open_experiment
from searches.tracking.names import DRIFTED, ENGINE_FAILED, ENGINE_LOG, FIGURES, PREDICTED
from searches.tracking.parameters import parameters

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
_NOT_MEASURED = dict.fromkeys((*_METRICS, PREDICTED), math.nan)
"""Metrics of a run without figures. MLflow's parallel coordinates omit NaN, and draw a missing metric as the largest."""
_FIT_METRICS = ("fit_seconds", "agreement_empty", "agreement_bridged")
_BATCH = 999  # metrics per batch: a store takes at most 1000, and this divides into whole fits
_PARAMS = 100  # parameters per batch: a store takes no more
_LARGEST = 1e300  # stores turn larger numbers into others
_NAME = 250  # characters of a run's name: a store takes no more
_NOTE = "mlflow.note.content"  # the tag that MLflow shows as the description of a run
_BEST = "best"


class Tracker:
    """Writer of the runs of one study.

    Args:
        uri: of the tracking store; None creates a SQLite store in ``folder``.
        folder: of a store that is created.
        experiment: the name of the experiment; it is created if it does not exist.

    Raises:
        InputError: the store cannot be opened, or the experiment was deleted.
    """

    def __init__(self, uri: str | None, folder: Path, experiment: str) -> None:
        self._client, self.uri, self._experiment = open_experiment(uri, folder, experiment)

    @defer_interrupt()
    def open_study(
        self, name: str, identity: str, params: Mapping[str, Any], tags: Mapping[str, Any], role: str = "study"
    ) -> str:
        """Create the run of a study, or resume it.

        Args:
            name: of the study.
            identity: distinguishes it from others of that name.
            params: flat settings; repeated on every trial's run, because MLflow's filters drop parent runs.
            tags: of the study's run only.
            role: the tag of the run's purpose, if it is not a study.
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
            self.log(self.run_id, _NOT_MEASURED if role == "study" else {}, self._params)
        self._recorded: set[int] = set()
        self._waiting: dict[int, FrozenTrial] = {}
        return str(self.run_id)

    def nested(self, name: str, identity: str, params: Mapping[str, Any], role: str) -> Tracker:
        """Open a nested run for a part of the study; the arguments are those of :meth:`open_study`."""
        child = copy.copy(self)
        child.open_study(name, identity, params, {"mlflow.parentRunId": self.run_id}, role)
        return child

    def reconcile(self, trials: Sequence[FrozenTrial]) -> None:
        """Delete incomplete and doubled runs of trials, and write those that are missing; nobody else may write any.

        Waits for a store that cannot be reached.
        """
        Retry("tracking.uri: the store")(partial(self._reconcile, trials))

    def _reconcile(self, trials: Sequence[FrozenTrial]) -> None:
        self._recorded = set()
        for run in self._search(f"tags.study_id = '{self._identity}' and tags.role = 'trial'"):
            number = int(run.data.tags["trial_number"])
            if run.info.status == "RUNNING" or number in self._recorded:
                self._client.delete_run(run.info.run_id)
            else:
                self._recorded.add(number)
        for trial in trials:
            self._write(trial)
        self._waiting = {}

    def record(self, trial: FrozenTrial) -> None:
        """Write the run of a finished trial, unless it exists; do it later if the store cannot be reached."""
        self._waiting[trial.number] = trial
        try:
            for waiting in list(self._waiting.values()):
                self._write(waiting)
                del self._waiting[waiting.number]
        except Exception as error:
            if not is_unreachable(error):
                raise
            print(f"tracking.uri: cannot be reached; {len(self._waiting)} runs are written later", flush=True)

    @defer_interrupt()
    def _write(self, trial: FrozenTrial) -> None:
        """Write the run of a finished trial, unless it exists."""
        if trial.number in self._recorded:
            return
        config = SpeculativeConfig.from_dict(trial.user_attrs["config"])
        measurement = trial.user_attrs.get("measurement", {})
        tags = {
            "mlflow.parentRunId": self.run_id,
            "study": self._study,
            "study_id": self._identity,
            "role": "trial",
            "trial_number": str(trial.number),
            "trial_state": trial.state.name,
            "mask": config.mask,
            "config": config.label(),
            "losslessness": measurement.get("losslessness", {}).get("verdict", "unchecked"),
        }
        if "reason" in trial.user_attrs:
            tags["reason"] = trial.user_attrs["reason"]
        name = f"{trial.number} {tags['config']}"[:_NAME]
        run = self._client.create_run(self._experiment, _milliseconds(trial.datetime_start), tags, run_name=name)
        metrics = _NOT_MEASURED | {name: measurement[name] for name in _METRICS if name in measurement}
        metrics |= trial.user_attrs.get(FIGURES, {})
        if trial.user_attrs.get(PREDICTED) is not None:
            metrics[PREDICTED] = trial.user_attrs[PREDICTED]
        metrics["seconds"] = trial.user_attrs["seconds"]
        metrics[DRIFTED] = trial.user_attrs.get(DRIFTED, 0)
        for position, rate in enumerate(measurement.get("acceptance_by_position", ())):
            metrics[f"acceptance_at_{position + 1:02d}"] = rate
        self.log(run.info.run_id, metrics, parameters(config) | self._params)
        if "table" in trial.user_attrs:
            self._client.log_table(run.info.run_id, trial.user_attrs["table"], "prompts.json")
        if ENGINE_LOG in trial.user_attrs:
            self._client.log_text(run.info.run_id, trial.user_attrs[ENGINE_LOG], "engine.log")
        failed = str(trial.user_attrs.get("reason")).startswith(ENGINE_FAILED)
        status = "FAILED" if failed else "FINISHED"
        self._client.set_terminated(run.info.run_id, status, _milliseconds(trial.datetime_complete))
        self._recorded.add(trial.number)

    @defer_interrupt()
    def log_benchmark(self, record: Mapping[str, Any], texts: Mapping[str, str], file: Path) -> None:
        """Write the runs of a benchmark: one run, and one nested run per contender."""
        tags = {"role": "benchmark", "date": record["date"]} | {k: str(v) for k, v in record["environment"].items()}
        self.run_id = self._client.create_run(self._experiment, tags=tags, run_name="benchmark").info.run_id
        params = {key: str(record["target"][key]) for key in ("name", "dtype")}
        for name, result in record["results"].items():
            own = {"mlflow.parentRunId": self.run_id, "role": "contender", "contender": name}
            child = self._client.create_run(self._experiment, tags=own, run_name=name).info.run_id
            metrics = {metric: result[metric] for metric in _METRICS}
            metrics |= {} if result["drafter_bytes"] is None else {"drafter_bytes": result["drafter_bytes"]}
            self.log(child, metrics, params | {"lossless": str(result["lossless"])})
            self._client.set_terminated(child)
        for name, text in texts.items():
            self.log_text(text, name)
        self.log_file(file)
        self.finish()

    @defer_interrupt()
    def log(self, run_id: str, metrics: Mapping[str, float], params: Mapping[str, str] | None = None, step: int = 0) -> None:
        """Log metrics and parameters together. Infinite values, which stores turn into numbers, become NaN.

        Args:
            run_id: of the run.
            metrics: by name.
            params: by name; None for none.
            step: of the metrics.
        """
        now = int(time.time() * 1000)
        values = [Metric(k, float(v) if abs(v) < _LARGEST else math.nan, now, step) for k, v in metrics.items()]
        given = [Param(k, v) for k, v in (params or {}).items()]
        self._client.log_batch(run_id, metrics=values, params=given[:_PARAMS])
        for first in range(_PARAMS, len(given), _PARAMS):
            self._client.log_batch(run_id, params=given[first : first + _PARAMS])

    @defer_interrupt()
    def log_fits(self, fits: Sequence[Mapping[str, Any]]) -> None:
        """Log fits of bridges: metrics with one step per fit, and a table of the fits in ``fits.json``.

        Args:
            fits: all fits so far, always in the same order: ``fit_seconds``, ``agreement_empty``, ``agreement_bridged`` and
                fields that describe the fit. Logged fits are not logged again. An empty one keeps its step.
        """
        logged = {metric.step for metric in self._client.get_metric_history(self.run_id, _FIT_METRICS[0])}
        new = [(step, fit) for step, fit in enumerate(fits) if fit and step not in logged]
        now = int(time.time() * 1000)
        values = [Metric(name, float(fit[name]), now, step) for step, fit in new for name in _FIT_METRICS]
        for first in range(0, len(values), _BATCH):
            self._client.log_batch(self.run_id, metrics=values[first : first + _BATCH])
        if new:
            self._client.log_text(self.run_id, json.dumps(fits, indent=1), "fits.json")

    @defer_interrupt()
    def tag(self, tags: Mapping[str, Any]) -> None:
        """Set tags of the study's run."""
        self._client.log_batch(self.run_id, tags=[RunTag(key, str(value)) for key, value in tags.items()])

    @defer_interrupt()
    def conclude(self, winner: str, sentence: str, trial: int | None) -> None:
        """Write the result of a finished study: tags and the description of its run, and the tag ``best`` of the winner's.

        Args:
            winner: its configuration.
            sentence: the verdict.
            trial: the number of the trial that stands for the winner; None if no trial does. Earlier winners lose the tag.
        """
        self.tag({"winner": winner, "verdict": sentence, _NOTE: sentence})
        for run in self._search(f"tags.study_id = '{self._identity}' and tags.{_BEST} = 'true'"):
            self._client.delete_tag(run.info.run_id, _BEST)
        if trial is not None:
            for run in self._search(f"tags.study_id = '{self._identity}' and tags.trial_number = '{trial}'"):
                self._client.set_tag(run.info.run_id, _BEST, "true")

    @defer_interrupt()
    def log_text(self, text: str, name: str) -> None:
        """Log a text as an artifact of the study's run."""
        self._client.log_text(self.run_id, text, name)

    @defer_interrupt()
    def log_file(self, path: Path, folder: str | None = None) -> None:
        """Log a file as an artifact of the study's run, in a folder of its artifacts."""
        self._client.log_artifact(self.run_id, str(path), folder)

    @contextlib.contextmanager
    def closing(self, leave: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Close the study's run after a block, also if it raises.

        Args:
            leave: called if it raises; returns whether others still work on the study, whose run then stays open.
        """
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Exception):  # the first error is the one to report
                if not leave():
                    self.finish("KILLED" if is_interrupt(error) else "FAILED")
            raise
        Retry("tracking.uri: the store")(self.finish)

    @defer_interrupt()
    def finish(self, status: str = "FINISHED") -> None:
        """Close the study's run as ``FINISHED``, ``KILLED`` (interrupted) or ``FAILED``."""
        self._client.set_terminated(self.run_id, status)

    def _search(self, query: str) -> list[Run]:
        runs: list[Run] = []
        token = None
        while True:
            page = self._client.search_runs([self._experiment], query, max_results=1000, page_token=token)
            runs += page
            if not (token := page.token):
                return runs


def _milliseconds(moment: Any) -> int | None:
    return None if moment is None else int(moment.timestamp() * 1000)

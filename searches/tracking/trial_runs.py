"""The runs of a study's trials: each finished trial has one, which is written from the study."""

from __future__ import annotations

import math
from typing import Any

from optuna.trial import FrozenTrial

from layerskip import SpeculativeConfig
from searches.tracking.names import DRIFTED, ENGINE_FAILED, ENGINE_LOG, METRICS, PREDICTED
from searches.tracking.parameters import parameters
from searches.tracking.run import PARENT, Store, StudyRun, metrics_now

MEASURED = (
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
    "speedup_low",
    "speedup_high",
    "acceptance_rate",
    "mean_acceptance_length",
    "draft_share",
    "peak_memory_bytes",
    "prefill_seconds",
    "decode_seconds",
)
NOT_MEASURED = dict.fromkeys((*MEASURED, PREDICTED), math.nan)
"""Metrics of a run without metrics. MLflow's parallel coordinates omit NaN, and draw a missing metric as the largest."""
_NAME = 250  # characters of a run's name: a store takes no more


class TrialRuns:
    """Writer of the runs of a study's trials.

    Args:
        store: holds the runs.
        study: the run that they are nested below.
    """

    def __init__(self, store: Store, study: StudyRun) -> None:
        self._store, self._study = store, study
        self._recorded: set[int] = set()
        self._begun: dict[int, str] = {}  # runs whose writing failed
        self._is_tidy = True

    def check_again(self) -> None:
        """Delete incomplete and doubled runs before the next one is written; nobody else may write any by then."""
        self._is_tidy = False

    def write(self, trial: FrozenTrial) -> None:
        """Write the run of a finished trial, unless it exists."""
        if not self._is_tidy:
            self._tidy()
        if trial.number in self._recorded:
            return
        config = SpeculativeConfig.from_dict(trial.user_attrs["config"])
        client, run_id = self._store.client, self._begun.get(trial.number)
        if run_id is None:
            tags = self._tags(trial, config)
            name = f"{trial.number} {tags['config']}"[:_NAME]
            run_id = self._begun[trial.number] = self._store.create(name, tags, _milliseconds(trial.datetime_start))
        self._store.log(run_id, metrics_now(_metrics(trial)), {**parameters(config), **self._study.params})
        if "table" in trial.user_attrs:
            client.log_table(run_id, trial.user_attrs["table"], "prompts.json")
        if ENGINE_LOG in trial.user_attrs:
            client.log_text(run_id, trial.user_attrs[ENGINE_LOG], "engine.log")
        failed = str(trial.user_attrs.get("reason")).startswith(ENGINE_FAILED)
        client.set_terminated(run_id, "FAILED" if failed else "FINISHED", _milliseconds(trial.datetime_complete))
        self._recorded.add(trial.number)

    def _tags(self, trial: FrozenTrial, config: SpeculativeConfig) -> dict[str, str]:
        measurement = trial.user_attrs.get("measurement", {})
        tags = {
            PARENT: self._study.current(),
            "study": self._study.name,
            "study_id": self._study.identity,
            "role": "trial",
            "trial_number": str(trial.number),
            "trial_state": trial.state.name,
            "mask": config.mask,
            "config": config.label(),
            "losslessness": measurement.get("losslessness", {}).get("verdict", "unchecked"),
        }
        if "reason" in trial.user_attrs:
            tags["reason"] = trial.user_attrs["reason"]
        return tags

    def _tidy(self) -> None:
        """Delete incomplete and doubled runs, and nest the others below the run of the study."""
        study, recorded = self._study.current(), set[int]()
        for run_id in self._study.doubled():
            self._store.client.delete_run(run_id)
        for run in self._store.search(f"tags.study_id = '{self._study.identity}' and tags.role = 'trial'"):
            number = int(run.data.tags["trial_number"])
            if run.info.status == "RUNNING" or number in recorded:
                self._store.client.delete_run(run.info.run_id)
                continue
            recorded.add(number)
            if run.data.tags.get(PARENT) != study:
                self._store.client.set_tag(run.info.run_id, PARENT, study)
        self._recorded, self._begun, self._is_tidy = recorded, {}, True


def _metrics(trial: FrozenTrial) -> dict[str, float]:
    measurement = trial.user_attrs.get("measurement", {})
    metrics = NOT_MEASURED | {name: measurement[name] for name in MEASURED if name in measurement}
    metrics |= trial.user_attrs.get(METRICS, {})
    if trial.user_attrs.get(PREDICTED) is not None:
        metrics[PREDICTED] = trial.user_attrs[PREDICTED]
    metrics["seconds"] = trial.user_attrs["seconds"]
    metrics[DRIFTED] = trial.user_attrs.get(DRIFTED, 0)
    for position, rate in enumerate(measurement.get("acceptance_by_position", ())):
        metrics[f"acceptance_at_{position + 1:02d}"] = rate
    return metrics


def _milliseconds(moment: Any) -> int | None:
    return None if moment is None else int(moment.timestamp() * 1000)

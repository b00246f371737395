"""The runs of a tracking store, which users may delete while a program writes to it.

MLflow compares runs axis by axis. A run without a parameter is drawn at the end of its axis, and words are cut after ten
characters. The parameters that all methods have are therefore numbers where there are any, and short names. A comparison
begins with the first three parameters of the alphabet, so the names of the others begin with ``with_``.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, LifecycleStage, Metric, Param, Run, ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT, MLFLOW_LOGGED_ARTIFACTS
from optuna.trial import FrozenTrial

from layerskip import PromptSet, SpeculativeConfig, draft_plan
from layerskip.config import methods
from searches.tracking.names import DRIFTED, ENGINE_FAILED, ENGINE_LOG, METRICS, PREDICTED

PARENT = "mlflow.parentRunId"
"""The tag by which MLflow nests a run below another."""
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
    "copies_bytes",
    "prefill_seconds",
    "decode_seconds",
)
NOT_MEASURED = dict.fromkeys((*MEASURED, PREDICTED), math.nan)
"""Metrics of a run without metrics. MLflow's parallel coordinates omit NaN, and draw a missing metric as the largest."""
_TABLE = "prompts.json"  # the artifact of a trial's run with a row per prompt
_METRICS = 1000  # metrics per batch: a store takes no more
_PARAMS = 100  # parameters per batch: a store takes no more
_NAME = 250  # characters of a run's name: a store takes no more
_DIGEST = 36  # characters of a dataset's digest: a store takes no more
_LARGEST = 1e300  # stores turn larger numbers into others


class Store:
    """An experiment of a tracking store."""

    def __init__(self, client: MlflowClient, experiment: str) -> None:
        self.client, self.experiment = client, experiment

    def search(self, query: str, view: int = ViewType.ACTIVE_ONLY, token: str | None = None) -> list[Run]:
        """Return all runs that a query finds, the latest first, from the page of a token on."""
        page = self.client.search_runs([self.experiment], query, view, max_results=1000, page_token=token)
        return [*page, *self.search(query, view, page.token)] if page.token else list(page)

    def create(self, name: str, tags: Mapping[str, Any], start: int | None = None) -> str:
        return str(self.client.create_run(self.experiment, start, dict(tags), run_name=name).info.run_id)

    def log(self, run_id: str, metrics: Sequence[Metric], params: Mapping[str, str] | None = None) -> None:
        """Log metrics and parameters together, in as few batches as a store takes."""
        given = [Param(key, value) for key, value in (params or {}).items()]
        while metrics or given:
            self.client.log_batch(run_id, metrics=metrics[:_METRICS], params=given[:_PARAMS])
            metrics, given = metrics[_METRICS:], given[_PARAMS:]


def metrics_now(metrics: Mapping[str, float], step: int = 0) -> list[Metric]:
    """Return metrics of this moment. Infinite values, which stores turn into numbers, become NaN."""
    now = int(time.time() * 1000)
    return [Metric(k, float(v) if abs(v) < _LARGEST else math.nan, now, step) for k, v in metrics.items()]


def dataset_of(prompts: PromptSet) -> DatasetInput:
    """Return the prompts of a study as MLflow's dataset."""
    source, profile = json.dumps({"uri": prompts.name}), json.dumps({"num_rows": len(prompts)})
    data = Dataset(prompts.name, prompts.digest[:_DIGEST], "local", source, profile=profile)
    return DatasetInput(data, [InputTag(MLFLOW_DATASET_CONTEXT, "search")])


@dataclass
class StudyRun:
    """The run of a study or a training. It is found, or made again after it was deleted, when it is written to.

    ``identity`` and ``role`` distinguish it from others of its name. ``texts`` are artifacts by name. ``dataset`` is what
    the run and those of its trials decode; None if the store is not told. ``id`` is None until the store was reached.
    """

    store: Store
    name: str
    identity: str
    role: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    texts: Mapping[str, str]
    dataset: DatasetInput | None
    id: str | None = None
    is_checked: bool = False
    """Whether the run was there at the last write; False looks for it before the next one."""
    is_new: bool = False
    """Whether this process has just made the run, as another one may have; the next look is for both."""

    def current(self) -> str:
        """Return the identifier of the run, which is made again if it was deleted."""
        if self.id is None or not self.is_checked:
            self.id, self.is_checked = self._find(), True
        return self.id

    def log_dataset(self, run_id: str) -> None:
        """Log what a run decodes, unless the store knows no datasets."""
        if self.dataset is not None:
            try:
                self.store.client.log_inputs(run_id, [self.dataset])
            except MlflowException:
                self.dataset = None

    def found(self, view: int = ViewType.ACTIVE_ONLY) -> list[Run]:
        """Return the runs of the study. Of several, which processes made that missed a deleted one, the last is used."""
        return self.tagged(f"role = '{self.role}'", view)

    def tagged(self, condition: str, view: int = ViewType.ACTIVE_ONLY) -> list[Run]:
        """Return the runs of the study and its trials whose tags meet a condition, the latest first."""
        return self.store.search(f"tags.study_id = '{self.identity}' and tags.{condition}", view)

    def _is_active(self, run_id: str) -> bool:
        try:
            return bool(self.store.client.get_run(run_id).info.lifecycle_stage == LifecycleStage.ACTIVE)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def _find(self) -> str:
        client = self.store.client
        if self.id is not None and not self.is_new and self._is_active(self.id):
            return self.id
        found, self.is_new = self.found()[-1:], False
        if self.id is not None and self.id in [run.info.run_id for run in found]:
            return self.id
        deleted = self.found(ViewType.DELETED_ONLY)
        if found:
            run_id = str(found[0].info.run_id)
            client.update_run(run_id, status="RUNNING")
        else:
            own = {"study": self.name, "study_id": self.identity, "role": self.role}
            run_id, self.is_new = self.store.create(self.name, own | dict(self.tags)), True
            if deleted:
                print(f"tracking.uri: the run of {self.name} was deleted; it is made again", flush=True)
        for name, text in self.texts.items():
            client.log_text(run_id, text, name)
        if not found or not found[0].data.params:  # a failure may have come before them
            self.store.log(run_id, metrics_now(NOT_MEASURED if self.role == "study" else {}), self.params)
            self.log_dataset(run_id)
        for before in deleted:
            for child in self.store.search(f"tags.`{PARENT}` = '{before.info.run_id}'"):
                client.set_tag(child.info.run_id, PARENT, run_id)
        return run_id


class TrialRuns:
    """Writer of the runs of a study's trials, which are nested below the study's run."""

    def __init__(self, study: StudyRun) -> None:
        self._store, self._study = study.store, study
        self._recorded: set[int] = set()
        self._begun: dict[int, str] = {}  # runs whose writing failed
        self.is_tidy = True  # else incomplete and doubled runs go before any is written

    def write(self, trial: FrozenTrial) -> None:
        if not self.is_tidy:
            self._tidy()
        if trial.number in self._recorded:
            return
        config, client = SpeculativeConfig.from_dict(trial.user_attrs["config"]), self._store.client
        if (run_id := self._begun.get(trial.number)) is None:
            name = f"{trial.number} {config.label()}"[:_NAME]
            start = _milliseconds(trial.datetime_start)
            run_id = self._begun[trial.number] = self._store.create(name, self._tags(trial, config), start)
        params = parameters(config, int(self._study.params.get("target.layers", 0))) | dict(self._study.params)
        self._store.log(run_id, metrics_now(_metrics(trial)), params)
        if "table" in trial.user_attrs:
            client.log_text(run_id, _as_table(trial.user_attrs["table"]), _TABLE)
        if ENGINE_LOG in trial.user_attrs:
            client.log_text(run_id, trial.user_attrs[ENGINE_LOG], "engine.log")
        failed = str(trial.user_attrs.get("reason")).startswith(ENGINE_FAILED)
        client.set_terminated(run_id, "FAILED" if failed else "FINISHED", _milliseconds(trial.datetime_complete))
        self._recorded.add(trial.number)
        self._study.log_dataset(run_id)

    def _tags(self, trial: FrozenTrial, config: SpeculativeConfig) -> dict[str, str]:
        measurement = trial.user_attrs.get("measurement", {})
        tags = {name: value for name, value in self._study.tags.items() if name.startswith("mlflow.source.")} | {
            PARENT: self._study.current(),
            "study": self._study.name,
            "study_id": self._study.identity,
            "role": "trial",
            "trial_number": str(trial.number),
            "trial_state": trial.state.name,
            "plan": next(filter(None, (part.plan for part in config.members or (config,))), ""),
            "config": config.label(),
            "losslessness": measurement.get("losslessness", {}).get("verdict", "unchecked"),
        }
        if "table" in trial.user_attrs:
            tags[MLFLOW_LOGGED_ARTIFACTS] = json.dumps([{"path": _TABLE, "type": "table"}])
        return tags | ({"reason": trial.user_attrs["reason"]} if "reason" in trial.user_attrs else {})

    def _tidy(self) -> None:
        """Delete incomplete and doubled runs, while nobody writes any, and nest the others below the run of the study."""
        study, recorded = self._study.current(), set[int]()
        for run in self._study.found():
            if run.info.run_id != study:
                self._store.client.delete_run(run.info.run_id)
        for run in self._study.tagged("role = 'trial'"):
            number = int(run.data.tags["trial_number"])
            if run.info.status == "RUNNING" or number in recorded:
                self._store.client.delete_run(run.info.run_id)
                continue
            recorded.add(number)
            if run.data.tags.get(PARENT) != study:
                self._store.client.set_tag(run.info.run_id, PARENT, study)
        self._recorded, self._begun, self.is_tidy = recorded, {}, True


def _metrics(trial: FrozenTrial) -> dict[str, float]:
    known = trial.user_attrs
    measurement = known.get("measurement", {})
    metrics: dict[str, float] = NOT_MEASURED | {name: measurement[name] for name in MEASURED if name in measurement}
    metrics |= known.get(METRICS, {})
    if known.get(PREDICTED) is not None:
        metrics[PREDICTED] = known[PREDICTED]
    metrics |= {"seconds": known["seconds"], DRIFTED: known.get(DRIFTED, 0)}
    rates = enumerate(measurement.get("acceptance_by_position", ()), 1)
    return metrics | {f"acceptance_at_{position:02d}": rate for position, rate in rates}


def _as_table(columns: Mapping[str, Sequence[object]]) -> str:
    """Return columns as MLflow stores a table. Its own ``log_table`` takes a third of the time of all writes."""
    rows = zip(*columns.values(), strict=True)
    data = [[None if value != value else value for value in row] for row in rows]  # JSON has no NaN
    return json.dumps({"columns": list(columns), "data": data}, allow_nan=False)


def _milliseconds(moment: Any) -> int | None:
    return None if moment is None else int(moment.timestamp() * 1000)


def parameters(config: SpeculativeConfig, layers: int = 0) -> dict[str, str]:
    """Return the MLflow parameters of a configuration: a summary that runs of all methods have, and the method's fields.

    Plain decoding drafts 0 tokens; a cascade drafts as many as the member with the longest drafts. If the number of
    ``layers`` is given, ``with_int8_sublayers`` and ``with_int4_sublayers`` count what a draft reads at fewer bits. The
    fields of the method follow, such as ``with_prompt_lookup_max``, and those of members, such as ``with_member_0_method``.
    """
    parts = config.members or (config,)
    skipped = [draft_plan.sublayers(part.plan) for part in parts]
    summary: dict[str, object] = {
        "drafter": methods()[config.method].short,
        "num_speculative_tokens": 0 if config.method == "none" else max(part.num_speculative_tokens for part in parts),
        "skipped_attention": sum(len(attention) for attention, _ in skipped),
        "skipped_mlp": sum(len(mlp) for _, mlp in skipped),
    }
    if layers:
        read = Counter(bits for plan in config.plans(layers) for bits in plan.sublayer_bits)
        summary |= {f"with_{name}_sublayers": read[bits] for name, bits in draft_plan.BITS.items() if bits}
    fields = _fields(config)
    summary |= {f"with_{key}": fields[key] for key in fields if key not in ("method", "num_speculative_tokens")}
    return {key: str(value) for key, value in summary.items()}


def _fields(config: SpeculativeConfig) -> dict[str, object]:
    """Return the fields of a configuration and its members. A mask is a tag of the run, because it may be long."""
    stored = config.to_dict()
    fields = {key: value for key, value in stored.items() if key not in ("mask", "stop", "members")}
    for place, member in enumerate(config.members):
        fields |= {f"member_{place}_{key}": value for key, value in _fields(member).items()}
    if "stop" in stored:
        fields["stop"] = config.stop.method
        if config.stop.method != "length":
            fields["threshold"] = config.stop.threshold
    return fields

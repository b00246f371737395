"""What a user of MLflow reads of a study: the names of its runs, its description, and the run of the winner."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import NoReturn

import pytest
from mlflow.tracking import MlflowClient

from layerskip import SpeculativeConfig
from searches.tracking.runs import MEASURED, parameters
from searches.tracking.tracker import Tracker
from tests.searches.known import lookup
from tests.searches.programs import runs, sqlite, tracked
from tests.searches.tracking.studies import CASCADE, NOT_RUN, SKIP, SPEEDUPS, compared_study

AXES = ("drafter", "num_speculative_tokens", "skipped_attention", "skipped_mlp")


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store that holds the runs of the study."""
    folder = tracked(tmp_path_factory.mktemp("compared"))
    uri, tracker = sqlite(folder), Tracker(None, folder, "compared")
    tracker.open_study("a study", "1", {"measure.prompts": 8}, {})
    for trial in compared_study().trials:
        tracker.record(trial)
    tracker.conclude("no drafting", "The first sentence.", 1, {"trials": 6})
    tracker.conclude("cascade", "cascade wins: 1.90 x plain decoding.", 5, {"trials": 7})
    return uri


def test_a_run_tells_its_configuration_and_has_a_value_on_the_axes_of_a_comparison(uri: str) -> None:
    """A trial that was not run has no place on the axes of metrics."""
    trials = sorted(runs(uri, "trial"), key=lambda run: int(run.data.tags["trial_number"]))
    names = [run.info.run_name for run in trials]
    assert names == [f"{number} {config.label()}" for number, config in enumerate([*SPEEDUPS, NOT_RUN])]
    for run, speedup in zip(trials, [*SPEEDUPS.values(), math.nan], strict=True):
        assert run.data.params.keys() >= set(AXES)
        assert run.data.metrics["tokens_per_second"] == pytest.approx(10 * speedup, nan_ok=True)
        assert math.isnan(run.data.metrics["acceptance_rate"]) == math.isnan(speedup)


def test_the_study_tells_its_winner_and_only_the_winner_is_best(uri: str) -> None:
    (study,) = runs(uri, "study")
    assert study.data.tags["mlflow.note.content"] == "cascade wins: 1.90 x plain decoding."
    client = MlflowClient(uri)
    (best,) = client.search_runs([study.info.experiment_id], "tags.best = 'true'")
    assert best.data.tags["trial_number"] == "5"
    assert best.data.tags["mlflow.parentRunId"] == study.info.run_id


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SpeculativeConfig(), ("none", "0", "0", "0")),
        (SKIP, ("layer_skip", "3", "3", "2")),
        (CASCADE, ("cascade", "8", "0", "0")),
        (SpeculativeConfig("cascade", members=(lookup(2), SKIP)), ("cascade", "3", "3", "2")),
    ],
)
def test_numbers_summarise_a_configuration(config: SpeculativeConfig, expected: tuple[str, ...]) -> None:
    found = parameters(config)
    assert tuple(found[name] for name in AXES) == expected


def test_sublayers_are_counted_by_format() -> None:
    config = SpeculativeConfig.from_dict({"method": "quantized", "weights": "int4;mlp:0,2=int8;attention:1=skip;head=keep"})
    found = parameters(config, layers=4)
    assert (found["with_int4_sublayers"], found["with_int8_sublayers"], found["skipped_attention"]) == ("5", "2", "1")
    assert parameters(SKIP, layers=30)["with_int4_sublayers"] == "0"


@pytest.fixture
def tracker(tmp_path: Path) -> Tracker:
    """The writer of a new study."""
    tracked(tmp_path)
    tracker = Tracker(None, tmp_path, "own")
    tracker.open_study("a study", "1", {"measure.prompts": 8}, {})
    return tracker


def test_a_defect_is_raised(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise ValueError("a defect")

    monkeypatch.setattr(tracker._store.client, "create_run", refuse)
    with pytest.raises(ValueError, match="a defect"):
        tracker.record(compared_study().trials[2])


def test_incomplete_and_doubled_runs_are_replaced(tracker: Tracker) -> None:
    trials = compared_study().trials
    for trial in trials[:3]:
        tracker.record(trial)
    (incomplete,) = (run for run in runs(tracker.uri, "trial") if run.data.tags["trial_number"] == "1")
    tracker._store.client.update_run(incomplete.info.run_id, status="RUNNING")
    other = Tracker(None, Path(tracker.uri.removeprefix("sqlite:///")).parent, "own")
    other.open_study("a study", "1", {"measure.prompts": 8}, {})
    assert other.run_id == tracker.run_id
    other.record(trials[2])  # it does not know of the run
    other.reconcile(trials[:4])
    found = runs(tracker.uri, "trial")
    assert sorted(run.data.tags["trial_number"] for run in found) == ["0", "1", "2", "3"]
    assert {run.info.status for run in found} == {"FINISHED"}
    assert incomplete.info.run_id not in {run.info.run_id for run in found}


@pytest.mark.parametrize(
    ("error", "others", "status"),
    [
        (None, False, "FINISHED"),
        (KeyboardInterrupt(), False, "KILLED"),
        (ValueError(), False, "FAILED"),
        (KeyboardInterrupt(), True, "RUNNING"),
    ],
)
def test_the_run_of_a_study_tells_how_it_ended(
    tracker: Tracker, error: BaseException | None, others: bool, status: str
) -> None:
    with contextlib.suppress(KeyboardInterrupt, ValueError), tracker.closing(lambda: others):
        if error is not None:
            raise error
    (study,) = runs(tracker.uri, "study")
    assert study.info.status == status


@pytest.mark.parametrize("seconds", [0.05, 30.0])
def test_the_use_of_the_machine_is_logged_also_by_a_short_program(
    seconds: float, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("searches.tracking.tracker._WATCH_SECONDS", seconds)
    with tracker.closing():
        time.sleep(0.5)
    (study,) = runs(tracker.uri, "study")
    assert 0 <= study.data.metrics["system/cpu_utilization_percentage"] <= 100


def test_a_benchmark_has_a_run_for_each_contender(tracker: Tracker, tmp_path: Path) -> None:
    result = dict.fromkeys(MEASURED, 2.0)
    results = {"plain": result | {"speedup": math.inf}, "engine": result}
    target = {"name": "a model", "dtype": "float32", "layers": 3}
    record = {"date": "2026-11-28", "environment": {"threads": 2}, "target": target, "results": results}
    (tmp_path / "benchmark.json").write_text("{}")
    tracker.log_benchmark(record, {"benchmark.md": "a table"}, tmp_path / "benchmark.json")
    (whole,) = runs(tracker.uri, "benchmark")
    assert (whole.data.tags["date"], whole.data.tags["threads"]) == ("2026-11-28", "2")
    found = {run.data.tags["contender"]: run for run in runs(tracker.uri, "contender")}
    assert {run.data.tags["mlflow.parentRunId"] for run in found.values()} == {whole.info.run_id}
    assert {run.info.status for run in (whole, *found.values())} == {"FINISHED"}
    assert all(run.data.params == {"name": "a model", "dtype": "float32"} for run in found.values())
    metrics = found["plain"].data.metrics
    assert metrics["acceptance_rate"] == 2.0
    assert math.isnan(metrics["speedup"])  # a store would turn it into a number
    paths = {file.path for file in MlflowClient(tracker.uri).list_artifacts(whole.info.run_id)}
    assert paths == {"benchmark.md", "benchmark.json"}

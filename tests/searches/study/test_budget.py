"""The seconds of a search: the share of each stage, and shared artifacts, which count once in every study."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from mlflow.tracking import MlflowClient

from layerskip import Export
from layerskip.measure.measurement import Sample
from searches.bridges.store import BRIDGES_FOLDER
from searches.report import markdown as report
from searches.study import budget as budgets
from searches.study.budget import FINALS, FITS, OPENING, PREDICTIONS, SHARED, TRIALS, Budget, TimeLedger, recorded_seconds
from searches.study.finals import Finals
from searches.study.study import StudySettings, counting_preparation, run_trials
from tests.searches.conftest import Launch
from tests.searches.known import Known, lookup, new_study, objective_of
from tests.searches.programs import quick, runs, sqlite, stored_study, tracked

NO_FINALS = Finals((), {}, 0.0)
STAGES = (OPENING, PREDICTIONS, TRIALS, FINALS)


def test_what_a_stage_leaves_unspent_belongs_to_the_next() -> None:
    budget = Budget(optuna.create_study(), 100.0, time.monotonic())
    lefts = [budget.left(stage) for stage in STAGES]
    assert lefts == sorted(lefts)
    assert lefts[0] == pytest.approx(23, abs=1)
    assert not any(budget.is_over(stage) for stage in STAGES)
    budget = Budget(optuna.create_study(), 100.0, time.monotonic() - 50)
    assert [budget.is_over(stage) for stage in STAGES] == [True, True, False, False]
    assert math.isinf(Budget(optuna.create_study(), None, time.monotonic() - 50).left(OPENING))


def test_a_resumed_study_has_the_seconds_that_are_left() -> None:
    study = optuna.create_study()
    Budget(study, 100.0, time.monotonic() - 30).save()
    resumed = Budget(study, 100.0, time.monotonic() - 10)  # has run for ten seconds
    assert resumed.spent == pytest.approx(40, abs=1)
    resumed.save()
    assert Budget(study, 200.0, time.monotonic()).spent == pytest.approx(40, abs=1)


def test_the_start_of_a_further_worker_is_not_spent_twice() -> None:
    study = optuna.create_study()
    Budget(study, 100.0, time.monotonic() - 30).save()
    assert Budget(study, 100.0, time.monotonic() - 20, leads=False).spent == pytest.approx(30, abs=1)


def test_what_is_left_out_is_said_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    study = optuna.create_study()
    budget = Budget(study, 1.0, time.monotonic())
    budget.leave_out(TRIALS, "5 of 32 ran in the budget")
    assert capsys.readouterr().out == "trials: 5 of 32 ran in the budget\n"
    assert budgets.left_out(study) == ["Trials: 5 of 32 ran in the budget."]
    budget.begin(TRIALS)  # of a later run, which may have more time
    assert budgets.left_out(study) == []


def test_fits_of_a_trial_count_once() -> None:
    study = optuna.create_study()
    ledger, trial = TimeLedger(study), study.ask()
    with budgets.record_shared_seconds(trial, [ledger]):
        ledger.use("one", 5.0, 5.0)
        ledger.use("other", 7.0)
    trial.set_user_attr("seconds", 6.0)  # its clock ran while one of them was fitted
    study.tell(trial, 1.0)
    assert report.search_seconds(study, NO_FINALS) == pytest.approx(5.0 + 7.0 + 1.0)


def test_an_interrupted_training_counts_once() -> None:
    study = optuna.create_study()
    ledger = TimeLedger(study)
    ledger.use("one", 5.0, 5.0)
    ledger.use("training", 7.0, 7.0)  # so far
    ledger.use("other", 1.0)
    again = TimeLedger(study)
    again.use("training", 12.0, 5.0)
    assert again.seconds_here == 5.0
    assert recorded_seconds(study, FITS) == {"one": 5.0, "training": 12.0, "other": 1.0}
    assert list(recorded_seconds(study, FITS)) == ["one", "training", "other"]


def test_seconds_of_an_interrupted_trial_count() -> None:
    class Broken(Known):
        def compare(self, *_: Any) -> Iterator[dict[str, Sample]]:
            time.sleep(0.05)
            raise KeyboardInterrupt

    study = new_study()
    with pytest.raises(KeyboardInterrupt):
        run_trials(study, objective_of(Broken({})), StudySettings(n_trials=1), lambda trial: None, [lookup(4)])
    with pytest.raises(KeyboardInterrupt), counting_preparation(study):
        next(Broken({}).compare())
    assert report.search_seconds(study, NO_FINALS) >= 0.1


def test_the_samplers_time_counts() -> None:
    class SlowSampler(optuna.samplers.RandomSampler):
        def infer_relative_search_space(self, *_: Any) -> dict[str, Any]:
            time.sleep(0.05)
            return {}

    study = new_study()
    study.sampler = SlowSampler(0)
    run_trials(study, objective_of(Known({})), StudySettings(n_trials=2), lambda trial: time.sleep(0.05))  # as MLflow does
    assert report.search_seconds(study, NO_FINALS) >= 0.15


def _kept(outputs: Path) -> dict[str, float]:
    """Return the seconds of every fit in the bridge store, from its files."""
    found = {path.parent.name: json.loads(path.read_text()) for path in outputs.glob(f"{BRIDGES_FOLDER}/*/*/head.json")}
    return {name: about["training"]["seconds"] for name, about in found.items() if about["kind"] == "bridge"}


@pytest.mark.system
def test_two_studies_share_a_bridge_store(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    bridging = ("bridging.tokens=200", "bridging.max_new_tokens=16", "bridging.batch=8", "bridging.train_seconds=0.5")
    which = ("space=bridged", "space.draft_heads=[0]", "scan.proposals.screened=8", "scan.proposals.enqueued=2")
    tracked(tmp_path)
    for name in ("one", "two"):
        more = ("study.n_trials=8", f"study.name={name}", *bridging, *which)
        done = launch("layerskip", *quick(tiny_folder, tmp_path, *more), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        fits, kept = recorded_seconds(stored_study(tmp_path, name), FITS), _kept(tmp_path)
        shared = recorded_seconds(stored_study(tmp_path, name), SHARED)
        assert {name.split()[0] for name in shared} == {"continuation", "profile", "texts", "reading"}
        assert shared == recorded_seconds(stored_study(tmp_path, "one"), SHARED)
        assert fits.keys() <= kept.keys()
        assert fits == {fit: kept[fit] for fit in fits}
        assert fits
        seconds = Export.load(tmp_path / name / "best.json").search["seconds"]
        assert seconds >= sum(fits.values()) + sum(shared.values())
        assert f"took {sum(fits.values()):.0f} seconds, {len(fits)} times" in (tmp_path / name / "report.md").read_text()
        (run,) = [run for run in runs(sqlite(tmp_path), "study") if run.data.tags["study"] == name]
        fitted = MlflowClient(sqlite(tmp_path)).get_metric_history(run.info.run_id, "fit_seconds")
        assert [metric.value for metric in sorted(fitted, key=lambda metric: metric.step)] == list(fits.values())
    logged = [run.data.metrics["search_seconds"] for run in runs(sqlite(tmp_path), "study")]
    assert seconds in logged
    trainings = runs(sqlite(tmp_path), "training")
    assert len(trainings) == sum(fit.startswith("trained-") for fit in kept)
    assert {run.info.status for run in trainings} <= {"FINISHED"}

"""The seconds of a search: the share of each stage, and shared artifacts, which count once in every study."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from layerskip import Export
from layerskip.measure.measurement import Sample
from searches.report import markdown as report
from searches.study import budget as budgets
from searches.study.budget import FINALS, OPENING, PREDICTIONS, TRIALS, Budget, recorded_seconds
from searches.study.finals import Finals
from searches.study.study import StudySettings, run_trials
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
    further = Budget(study, 100.0, time.monotonic() - 20, leads=False)  # whose start is not spent twice
    assert further.spent == pytest.approx(40, abs=1)


def test_what_is_left_out_is_said_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    study = optuna.create_study()
    budget = Budget(study, 1.0, time.monotonic())
    budget.leave_out(TRIALS, "5 of 32 ran in the budget")
    assert capsys.readouterr().out == "trials: 5 of 32 ran in the budget\n"
    assert budgets.left_out(study) == ["Trials: 5 of 32 ran in the budget."]
    budget.begin(TRIALS)  # of a later run, which may have more time
    assert budgets.left_out(study) == []


def test_shared_artifacts_count_once() -> None:
    study = optuna.create_study()
    budget = Budget(study, None, time.monotonic())
    budget.use("one", 5.0)  # made by another study
    with budget.preparing():  # its clock runs while one of them is made
        time.sleep(0.05)
        budget.use("profile", 0.04, 0.04)  # rough
    again = Budget(study, None, time.monotonic())
    again.use("profile", 12.0, 8.0)
    assert again.seconds_here == 8.0
    assert recorded_seconds(study) == {"one": 5.0, "profile": 12.0}
    assert 17.0 < report.search_seconds(study, NO_FINALS) < 17.04


def test_seconds_of_an_interrupted_trial_count() -> None:
    class Broken(Known):
        def compare(self, *_: Any) -> Iterator[dict[str, Sample]]:
            time.sleep(0.05)
            raise KeyboardInterrupt

    study = new_study()
    with pytest.raises(KeyboardInterrupt):
        run_trials(study, objective_of(Broken({})), StudySettings(n_trials=1), starts=[lookup(4)])
    with pytest.raises(KeyboardInterrupt), Budget(study, None, 0.0).preparing():
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


@pytest.mark.system
def test_two_studies_share_continuations_and_profiles(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    tracked(tmp_path)
    for name in ("one", "two"):
        more = ("study.n_trials=4", f"study.name={name}", "space=layer_skip", "scan.proposals.screened=8")
        done = launch("layerskip", *quick(tiny_folder, tmp_path, *more), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        shared = recorded_seconds(stored_study(tmp_path, name))
        assert {name.split()[0] for name in shared} == {"continuation", "profile"}
        assert shared == recorded_seconds(stored_study(tmp_path, "one"))
        seconds = Export.load(tmp_path / name / "best.json").search["seconds"]
        assert seconds >= sum(shared.values())
    assert seconds in [run.data.metrics["search_seconds"] for run in runs(sqlite(tmp_path), "study")]

"""A pruned suggestion is recorded in its trial, its MLflow run and the report."""

from __future__ import annotations

import math
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from layerskip import SpeculativeConfig
from searches.report import markdown as report
from searches.study.pruning import SpeedupBound
from searches.study.study import StudySettings, run_trials
from searches.tracking.names import PREDICTED
from searches.tracking.tracker import Tracker
from tests.searches.known import Known, lookup, new_study, objective_of
from tests.searches.programs import runs, sqlite, tracked

REASON = "cannot reach the best: at most 0.600 x, the best has 1.250 x"


class Pessimist:
    """Estimator that bounds one configuration below the leader, and no others."""

    def estimate(self, study: optuna.Study, config: SpeculativeConfig) -> SpeedupBound | None:
        return SpeedupBound(0.5, 0.6, 1.25) if config == lookup(5) else None


@pytest.fixture(scope="module")
def study() -> optuna.Study:
    """Return a study of two trials; the second was pruned."""
    study, objective = new_study(), objective_of(Known({lookup(4): 1.25}), bounds=Pessimist())
    run_trials(study, objective, StudySettings(n_trials=2), lambda trial: None, [lookup(4), lookup(5)])
    return study


def test_the_trial_has_the_reason_and_the_prediction(study: optuna.Study) -> None:
    measured, trial = study.trials
    assert trial.state == TrialState.PRUNED
    assert (trial.user_attrs["reason"], trial.user_attrs[PREDICTED]) == (REASON, 0.5)
    assert "measurement" not in trial.user_attrs
    assert not {"reason", PREDICTED} & measured.user_attrs.keys()


def test_the_run_has_the_reason_and_the_prediction(study: optuna.Study, tmp_path: Path) -> None:
    tracker = Tracker(None, tracked(tmp_path), "studies")
    tracker.open_study("pruned", "id", {}, {})
    for trial in study.trials:
        tracker.record(trial)
    measured, run = sorted(runs(sqlite(tmp_path), "trial"), key=lambda run: run.data.tags["trial_number"])
    assert (run.data.tags["trial_state"], run.data.tags["reason"]) == ("PRUNED", REASON)
    known = {name for name, value in run.data.metrics.items() if not math.isnan(value)}
    assert known == {PREDICTED, "seconds", "drifted"}
    assert run.data.metrics[PREDICTED] == 0.5
    assert "reason" not in measured.data.tags and measured.data.metrics["speedup"] == pytest.approx(1.25)


def test_the_report_counts_the_pruned_trial(study: optuna.Study) -> None:
    assert "2 trials: 0 stopped early, 1 not run (1 cannot win)." in report.summary(study, None)

"""Suggestions whose bound is below the leader are pruned; bounds follow from predictions and their errors."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import optuna
import pytest
from optuna.trial import TrialState

from layerskip import DraftPlan, SpeculativeConfig, StopRule
from searches.report import markdown as report
from searches.study.leaderboard import Leaderboard
from searches.study.pruning import BoundEstimator, SpeedupBound, calibrated_error
from searches.tracking.names import PREDICTED
from tests.searches.known import Known, lookup, measured_trial, run_known
from tests.searches.predict.test_proposals import LAYERS, additive

UNKNOWN = math.exp(0.15)  # the error that is assumed of predictions
AWFUL = SpeculativeConfig("layer_skip", 4, mask="attention:0-7")


def _estimate(config: SpeculativeConfig, *trials: optuna.trial.FrozenTrial) -> SpeedupBound:
    study = optuna.create_study(direction="maximize")
    study.add_trials(trials)
    bound = BoundEstimator(PREDICTOR).estimate(study, config)
    assert bound is not None
    return bound


PREDICTOR = additive(0)
(BEST,) = PREDICTOR.predict([DraftPlan.parse("mlp:3", LAYERS)])


def test_a_suggestion_below_the_leader_cannot_win() -> None:
    assert BoundEstimator(PREDICTOR).estimate(optuna.create_study(), lookup(4)) is None
    bound = _estimate(AWFUL)
    assert bound.reason  # the leader is plain decoding
    assert bound.predicted == pytest.approx(PREDICTOR.speedup(AWFUL))
    assert bound.upper == pytest.approx(PREDICTOR.speedup(AWFUL) * UNKNOWN)
    assert not _estimate(BEST.config).reason
    bound = _estimate(BEST.config, measured_trial(lookup(4), {"x": 100.0}, low=100.0))
    assert "100.000 x" in bound.reason
    assert bound.predicted is None  # costs alone rule it out
    assert bound.upper == pytest.approx(PREDICTOR.profile.speedup_bound(DraftPlan.parse("mlp:3", LAYERS)) * UNKNOWN)
    assert PREDICTOR.profile.speedup_bound(DraftPlan.none(LAYERS)) < 2.0


@pytest.mark.parametrize(
    ("speedups", "low", "to_beat"),
    [
        ({"x": 1.05, "y": 50.0}, 1.0, 1.05),  # far ahead on another prompt than the predicted one
        ({"x": 5.5}, 0.5, 1.0),  # disturbed: at most twice its lowest speedup counts
        ({"x": 5.5}, 1.3, 2.6),
    ],
)
def test_a_suggestion_is_compared_with_what_is_sure_of_the_leader(
    speedups: dict[str, float], low: float, to_beat: float
) -> None:
    assert _estimate(BEST.config, measured_trial(lookup(4), speedups, low=low)).to_beat == pytest.approx(to_beat)


def test_an_unscanned_stop_rule_is_bounded_by_the_best_scanned_one() -> None:
    right = [
        measured_trial(SpeculativeConfig("layer_skip", 1 + i), {"x": 0.9}, 0.9) for i in range(8)
    ]  # earlier predictions
    scanned = SpeculativeConfig("layer_skip", 2, mask="mlp:3")
    exact, other = (_estimate(replace(scanned, stop=stop), *right) for stop in (StopRule(), StopRule("threshold", 0.85)))
    assert other.predicted is None
    assert math.log(other.upper / exact.upper) == pytest.approx(0.15 - 0.03)


def _error(trials: list[optuna.trial.FrozenTrial], method: str) -> float:
    for number, trial in enumerate(trials):
        trial.number = number
    board = Leaderboard()
    board.update(trials)
    return calibrated_error(board.entries.values(), "x", method)


def test_the_bound_widens_with_prediction_errors() -> None:
    configs = [SpeculativeConfig("layer_skip", 1 + i) for i in range(8)]
    good = [1.0 + 0.001 * i for i in range(8)]
    right = [measured_trial(config, {"x": value}, 1.0) for config, value in zip(configs, good, strict=True)]
    assert _error([], "layer_skip") == pytest.approx(0.15)
    assert _error(right, "layer_skip") == pytest.approx(0.03)
    assert _error([measured_trial(configs[0], {"x": value}, 1.0) for value in good], "layer_skip") == pytest.approx(
        0.15
    )  # replicates
    bad = [measured_trial(config, {"x": 1.3 if i % 2 else 0.8}, 1.0) for i, config in enumerate(configs)]
    assert _error(bad, "layer_skip") > 0.4
    lookups = [measured_trial(lookup(1 + i), {"x": 1.0}, 1.0) for i in range(8)]
    assert _error(lookups, "prompt_lookup") == pytest.approx(0.03)
    assert _error(lookups, "layer_skip") == pytest.approx(0.15)  # errors of lookups do not count for masks
    others = [measured_trial(config, {"y": 1.1}, 0.9) for config in configs]
    assert _error(others, "layer_skip") == pytest.approx(0.15)  # nor do trials on other prompts


def test_a_pruned_suggestion_is_recorded_in_its_trial_and_the_report() -> None:
    reason = "cannot reach the best: at most 0.600 x, the best has 1.250 x"
    pessimist = SimpleNamespace(estimate=lambda _, config: SpeedupBound(0.5, 0.6, 1.25) if config == lookup(5) else None)
    study = run_known(Known({lookup(4): 1.25}), lookup(4), lookup(5), bounds=pessimist)
    measured, trial = study.trials
    assert trial.state == TrialState.PRUNED
    assert (trial.user_attrs["reason"], trial.user_attrs[PREDICTED]) == (reason, 0.5)
    assert "measurement" not in trial.user_attrs
    assert not {"reason", PREDICTED} & measured.user_attrs.keys()
    assert "2 trials: 0 stopped early, 1 not run (1 cannot win)." in report.summary(study, None)

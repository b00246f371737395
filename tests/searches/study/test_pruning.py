"""Suggestions whose bound is below the leader are pruned; bounds follow from predictions and their errors."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import IntDistribution
from optuna.trial import TrialState, create_trial

from layerskip import SkipMask, SpeculativeConfig, StopRule
from layerskip.config import EXACT, AcceptRule
from searches.report import markdown as report
from searches.study.leaderboard import Leaderboard
from searches.study.pruning import BoundEstimator, SpeedupBound, calibrated_error
from searches.tracking.names import PREDICTED
from searches.tracking.tracker import Tracker
from tests.searches.known import Known, lookup, run_known
from tests.searches.predict.test_proposals import LAYERS, Landscape
from tests.searches.programs import runs, sqlite, tracked


def _trial(config: SpeculativeConfig, value: float, predicted: float | None, **others: float) -> optuna.trial.FrozenTrial:
    """Return a trial on the prompt x, which predictions are of, and on others."""
    speedups = {"x": value, **others}
    table = {
        "prompt_id": list(speedups),
        "tokens_per_second": [10.0 * speedup for speedup in speedups.values()],
        "decode_seconds": [1.0] * len(speedups),
        "baseline_tokens_per_second": [10.0] * len(speedups),
    }
    attributes: dict[str, Any] = {
        "config": config.to_dict(),
        "table": table,
        "measurement": {"losslessness": {"verdict": "exact"}},
        PREDICTED: predicted,
    }
    return create_trial(
        value=value,
        params={"x": 0},
        distributions={"x": IntDistribution(0, 1)},
        user_attrs=attributes,
    )


def test_a_suggestion_below_the_leader_cannot_win() -> None:
    predictor, study = Landscape(0), optuna.create_study(direction="maximize")
    estimator, none = BoundEstimator(predictor), SkipMask.none(LAYERS)
    best = predictor.predict([SkipMask.parse("mlp:3", LAYERS)])[0]
    awful = SpeculativeConfig("layer_skip", 4, mask="attention:0-7")
    assert estimator.estimate(study, SpeculativeConfig("prompt_lookup", 4)) is None
    bound = estimator.estimate(study, awful)
    assert bound is not None and bound.cannot_win  # the leader is plain decoding
    assert bound.predicted == pytest.approx(predictor.speedup(awful))
    assert bound.upper == pytest.approx(predictor.speedup(awful) * math.exp(0.15))
    bound = estimator.estimate(study, best.config)
    assert bound is not None and not bound.cannot_win
    study.add_trial(_trial(SpeculativeConfig("prompt_lookup", 4), 100.0, None))
    bound = estimator.estimate(study, best.config)
    assert bound is not None and bound.cannot_win
    assert bound.predicted is None  # costs alone rule it out
    assert bound.upper == pytest.approx(predictor.profile.speedup_bound(SkipMask.parse("mlp:3", LAYERS)) * math.exp(0.15))
    assert predictor.profile.speedup_bound(none) < 2.0
    assert "100.000 x" in bound.reason()


def test_a_suggestion_is_compared_with_the_leader_on_the_predicted_prompts() -> None:
    predictor, study = Landscape(0), optuna.create_study(direction="maximize")
    best = predictor.predict([SkipMask.parse("mlp:3", LAYERS)])[0]
    study.add_trial(_trial(SpeculativeConfig("prompt_lookup", 4), 1.05, None, y=50.0))  # far ahead on another prompt
    bound = BoundEstimator(predictor).estimate(study, best.config)
    assert bound is not None and not bound.cannot_win
    assert bound.to_beat == pytest.approx(1.05)


def test_a_lossy_rule_is_bounded_by_costs_alone() -> None:
    predictor, study = Landscape(0), optuna.create_study(direction="maximize")
    mask = "attention:0-4"
    lossy = SpeculativeConfig("layer_skip", 4, mask=mask, accept=AcceptRule("threshold", 0.05))
    study.add_trial(_trial(SpeculativeConfig("prompt_lookup", 4), 1.2, None))
    exact, bound = (BoundEstimator(predictor).estimate(study, config) for config in (replace(lossy, accept=EXACT), lossy))
    assert exact is not None and exact.cannot_win
    assert bound is not None and not bound.cannot_win
    assert bound.upper == pytest.approx(predictor.profile.speedup_bound(SkipMask.parse(mask, LAYERS)) * math.exp(0.15))


def test_an_unscanned_stop_rule_is_bounded_by_the_best_scanned_one() -> None:
    predictor, study = Landscape(0), optuna.create_study(direction="maximize")
    for i in range(8):
        config = SpeculativeConfig("layer_skip", 1 + i)
        study.add_trial(_trial(config, 0.9, 0.9))  # earlier predictions were right
    exact = BoundEstimator(predictor).estimate(study, SpeculativeConfig("layer_skip", 2, mask="mlp:3"))
    other = BoundEstimator(predictor).estimate(
        study, SpeculativeConfig("layer_skip", 2, mask="mlp:3", stop=StopRule("threshold", 0.85))
    )
    tree = BoundEstimator(predictor).estimate(study, SpeculativeConfig("layer_skip", 2, mask="mlp:3", siblings=2))
    assert other is not None and tree is not None
    assert tree.predicted is None and other.upper < tree.upper < 1.2 * other.upper
    assert exact is not None and other is not None
    assert other.predicted is None
    assert math.log(other.upper / exact.upper) == pytest.approx(0.15 - 0.03)


def _error(trials: list[optuna.trial.FrozenTrial], method: str) -> float:
    for number, trial in enumerate(trials):
        trial.number = number
    board = Leaderboard()
    board.update(trials)
    return calibrated_error(board.entries.values(), "x", method)


def test_the_bound_widens_with_prediction_errors() -> None:
    config = SpeculativeConfig("layer_skip", 2)
    assert _error([], "layer_skip") == pytest.approx(0.15)
    same = [_trial(config, 1.0 + 0.001 * i, 1.0) for i in range(8)]
    # Replicates count as one configuration.
    assert _error(same, "layer_skip") == pytest.approx(0.15)
    configs = [SpeculativeConfig("layer_skip", 1 + i) for i in range(8)]
    good = [_trial(config, 1.0 + 0.001 * i, 1.0) for i, config in enumerate(configs)]
    assert _error(good, "layer_skip") == pytest.approx(0.03)
    bad = [_trial(config, 1.3 if i % 2 else 0.8, 1.0) for i, config in enumerate(configs)]
    assert _error(bad, "layer_skip") > 0.4
    lookups = [_trial(SpeculativeConfig("prompt_lookup", 1 + i), 1.0, 1.0) for i in range(8)]
    assert _error(lookups, "prompt_lookup") == pytest.approx(0.03)
    assert _error(lookups, "layer_skip") == pytest.approx(0.15)  # errors of lookups do not count for masks


def test_trials_on_other_prompts_do_not_calibrate_predictions() -> None:
    predictor, study = Landscape(0), optuna.create_study(direction="maximize")
    for length in range(1, 9):
        study.add_trial(_on_others(_trial(SpeculativeConfig("layer_skip", length), 1.1, 0.9)))
    bound = BoundEstimator(predictor).estimate(study, SpeculativeConfig("layer_skip", 4, mask="attention:0-7"))
    assert bound is not None and bound.to_beat == pytest.approx(1.1)
    assert bound.predicted is not None
    assert bound.upper == pytest.approx(bound.predicted * math.exp(0.15))


def _on_others(trial: optuna.trial.FrozenTrial) -> optuna.trial.FrozenTrial:
    trial.user_attrs["table"]["prompt_id"] = ["y"]
    return trial


class _Pessimist:
    """Estimator that bounds one configuration below the leader, and no others."""

    def estimate(self, study: optuna.Study, config: SpeculativeConfig) -> SpeedupBound | None:
        return SpeedupBound(0.5, 0.6, 1.25) if config == lookup(5) else None


@pytest.mark.system
def test_a_pruned_suggestion_is_recorded_in_its_trial_its_run_and_the_report(tmp_path: Path) -> None:
    reason = "cannot reach the best: at most 0.600 x, the best has 1.250 x"
    study = run_known(Known({lookup(4): 1.25}), lookup(4), lookup(5), bounds=_Pessimist())
    measured, trial = study.trials
    assert trial.state == TrialState.PRUNED
    assert (trial.user_attrs["reason"], trial.user_attrs[PREDICTED]) == (reason, 0.5)
    assert "measurement" not in trial.user_attrs
    assert not {"reason", PREDICTED} & measured.user_attrs.keys()
    assert "2 trials: 0 stopped early, 1 not run (1 cannot win)." in report.summary(study, None)
    tracker = Tracker(None, tracked(tmp_path), "studies")
    tracker.open_study("pruned", "id", {}, {})
    for each in study.trials:
        tracker.record(each)
    first, run = sorted(runs(sqlite(tmp_path), "trial"), key=lambda run: run.data.tags["trial_number"])
    assert (run.data.tags["trial_state"], run.data.tags["reason"]) == ("PRUNED", reason)
    assert {n for n, value in run.data.metrics.items() if not math.isnan(value)} == {PREDICTED, "seconds", "drifted"}
    assert "reason" not in first.data.tags and first.data.metrics["speedup"] == pytest.approx(1.25)

"""What is not run, as it cannot reach the best: what was foretold, how far that errs, and what it is foretold on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import optuna
import pytest
from optuna.distributions import IntDistribution
from optuna.trial import create_trial

from layerskip import SkipMask, SpeculativeConfig, StopRule
from layerskip.rules import EXACT, AcceptRule
from searches.study.pruning import Prior, calibrated_error
from searches.tracking.names import PREDICTED
from tests.searches.predict.test_proposals import LAYERS, Landscape


def _trial(config: SpeculativeConfig, value: float, predicted: float | None, **others: float) -> optuna.trial.FrozenTrial:
    """A trial on the prompt x, that is foretold on, and on others."""
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


def test_a_suggestion_that_cannot_reach_the_best_is_hopeless() -> None:
    oracle, study = Landscape(0), optuna.create_study(direction="maximize")
    prior, none = Prior(oracle), SkipMask.none(LAYERS)
    best = oracle.predict([SkipMask.parse("mlp:3", LAYERS)])[0]
    awful = SpeculativeConfig("layer_skip", 4, mask="attention:0-7")
    assert prior.judge(study, SpeculativeConfig("prompt_lookup", 4)) is None
    judgement = prior.judge(study, awful)
    assert judgement is not None and judgement.hopeless  # plain decoding is what has to be beaten
    assert judgement.predicted == pytest.approx(oracle.speedup(awful))
    assert judgement.bound == pytest.approx(oracle.speedup(awful) * math.exp(0.15))
    judgement = prior.judge(study, best.config)
    assert judgement is not None and not judgement.hopeless
    study.add_trial(_trial(SpeculativeConfig("prompt_lookup", 4), 100.0, None))
    judgement = prior.judge(study, best.config)
    assert judgement is not None and judgement.hopeless
    assert judgement.predicted is None  # costs alone rule it out: nothing is that fast
    assert judgement.bound == pytest.approx(oracle.profile.bound(SkipMask.parse("mlp:3", LAYERS)) * math.exp(0.15))
    assert oracle.profile.bound(none) < 2.0
    assert "100.000 x" in judgement.reason()


def test_a_suggestion_has_to_beat_the_best_where_it_was_foretold() -> None:
    oracle, study = Landscape(0), optuna.create_study(direction="maximize")
    best = oracle.predict([SkipMask.parse("mlp:3", LAYERS)])[0]
    study.add_trial(_trial(SpeculativeConfig("prompt_lookup", 4), 1.05, None, y=50.0))  # far ahead on another prompt
    judgement = Prior(oracle).judge(study, best.config)
    assert judgement is not None and not judgement.hopeless
    assert judgement.to_beat == pytest.approx(1.05)


def test_a_lossy_rule_may_accept_what_no_scan_counts() -> None:
    oracle, study = Landscape(0), optuna.create_study(direction="maximize")
    mask = "attention:0-4"
    lossy = SpeculativeConfig("layer_skip", 4, mask=mask, accept=AcceptRule("threshold", 0.05))
    study.add_trial(_trial(SpeculativeConfig("prompt_lookup", 4), 1.2, None))
    exact, judgement = (Prior(oracle).judge(study, config) for config in (replace(lossy, accept=EXACT), lossy))
    assert exact is not None and exact.hopeless
    assert judgement is not None and not judgement.hopeless
    assert judgement.bound == pytest.approx(oracle.profile.bound(SkipMask.parse(mask, LAYERS)) * math.exp(0.15))


def test_a_stop_rule_that_was_not_scanned_is_bounded_by_the_best_that_was() -> None:
    oracle, study = Landscape(0), optuna.create_study(direction="maximize")
    for i in range(8):
        config = SpeculativeConfig("layer_skip", 1 + i)
        study.add_trial(_trial(config, 0.9, 0.9))  # foretelling was right so far, where it foretold
    exact = Prior(oracle).judge(study, SpeculativeConfig("layer_skip", 2, mask="mlp:3"))
    other = Prior(oracle).judge(study, SpeculativeConfig("layer_skip", 2, mask="mlp:3", stop=StopRule("threshold", 0.85)))
    tree = Prior(oracle).judge(study, SpeculativeConfig("layer_skip", 2, mask="mlp:3", siblings=2))
    assert other is not None and tree is not None
    assert tree.predicted is None and other.bound < tree.bound < 1.2 * other.bound
    assert exact is not None and other is not None
    assert other.predicted is None
    assert math.log(other.bound / exact.bound) == pytest.approx(0.15 - 0.03)


def test_the_bound_widens_with_how_far_foretelling_was_off() -> None:
    config = SpeculativeConfig("layer_skip", 2)
    assert calibrated_error([], "x", "layer_skip") == pytest.approx(0.15)
    same = [_trial(config, 1.0 + 0.001 * i, 1.0) for i in range(8)]
    # Replicates of one configuration tell of that one.
    assert calibrated_error(same, "x", "layer_skip") == pytest.approx(0.15)
    configs = [SpeculativeConfig("layer_skip", 1 + i) for i in range(8)]
    good = [_trial(config, 1.0 + 0.001 * i, 1.0) for i, config in enumerate(configs)]
    assert calibrated_error(good, "x", "layer_skip") == pytest.approx(0.03)
    bad = [_trial(config, 1.3 if i % 2 else 0.8, 1.0) for i, config in enumerate(configs)]
    assert calibrated_error(bad, "x", "layer_skip") > 0.4
    lookups = [_trial(SpeculativeConfig("prompt_lookup", 1 + i), 1.0, 1.0) for i in range(8)]
    assert calibrated_error(lookups, "x", "prompt_lookup") == pytest.approx(0.03)
    assert calibrated_error(lookups, "x", "layer_skip") == pytest.approx(0.15)  # lookups tell nothing of masks


def test_what_was_decoded_on_none_of_the_foretold_prompts_tells_nothing_of_them() -> None:
    oracle, study = Landscape(0), optuna.create_study(direction="maximize")
    for length in range(1, 9):
        study.add_trial(_on_others(_trial(SpeculativeConfig("layer_skip", length), 1.1, 0.9)))
    judgement = Prior(oracle).judge(study, SpeculativeConfig("layer_skip", 4, mask="attention:0-7"))
    assert judgement is not None and judgement.to_beat == pytest.approx(1.1)
    assert judgement.predicted is not None
    assert judgement.bound == pytest.approx(judgement.predicted * math.exp(0.15))


def _on_others(trial: optuna.trial.FrozenTrial) -> optuna.trial.FrozenTrial:
    trial.user_attrs["table"]["prompt_id"] = ["y"]
    return trial

"""Tests of simulated decoders: the optimum against all masks, long-run speedups, and errors as large as configured."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from layerskip import DraftPlan, Measurement, SpeculativeConfig
from searches.evaluate.simulated import PROSPECTS, Landscape, Machine, SimulatedPredictor, draw_prompts, simulated_bench
from searches.predict.mask_search import SpeedupPredictor
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE

SPACE = SearchSpace(layers=8, methods=("none", "layer_skip", "prompt_lookup"), ranges={"layer_skip": {"stop": ["length"]}})
LANDSCAPE = Landscape.draw(3)
CONFIGS = {
    "masks": SpeculativeConfig("layer_skip", 5, mask="layers:2-9"),
    "lengths": SpeculativeConfig("layer_skip", 3, mask="layers:3-6;mlp:8,11"),
    "lookups": SpeculativeConfig("prompt_lookup", 6, prompt_lookup_min=2, prompt_lookup_max=3),
    "plain": SpeculativeConfig(),
}


def test_the_best_configuration_is_the_best_of_all_masks() -> None:
    landscape, space = Landscape.draw(1, layers=8), replace(SPACE, methods=("layer_skip",))
    parts = [set(layers) for count in range(5) for layers in itertools.combinations(space.skippable, count)]
    masks = [DraftPlan.of(8, *pair).format() for pair in itertools.product(parts, parts)]
    speedups = landscape.speedups([SpeculativeConfig("layer_skip", 2, mask=mask) for mask in masks])
    best, speedup = landscape.best(space)
    assert landscape.speedup(best) == pytest.approx(speedup)
    assert speedup >= max(speedups) - 1e-9
    assert best.num_speculative_tokens != 2 or speedup == pytest.approx(max(speedups))


def test_a_draft_that_is_always_right_is_always_accepted() -> None:
    profile = Landscape.draw(0, 8).profile
    landscape, config = Landscape(0, profile, np.zeros((2, 8))), SpeculativeConfig("layer_skip", 3, mask="layers:2-5")
    # 24, 36 and 48 tokens are multiples of the four tokens of a round.
    seconds = 3 * profile.draft_seconds(DraftPlan.parse(config.mask, 8)) + profile.verify_seconds[3]
    assert landscape.speedup(config) == pytest.approx(4 * profile.verify_seconds[0] / seconds)


def test_landscapes_are_as_hopeful_as_drawn() -> None:
    hopeful, hopeless, close = (Landscape.draw(2, 8, prospect) for prospect in PROSPECTS)
    assert hopeful.best(SPACE)[1] > 1.05
    assert hopeless.best(SPACE) == (SpeculativeConfig(), 1.0)
    assert close.best(SPACE)[1] < 1.06
    assert len([config for config in SPACE.lookups() if 0.95 < close.speedup(config) < 1.02]) > 5


@pytest.mark.parametrize("name", CONFIGS)
def test_the_long_run_speedup_is_the_true_one(name: str) -> None:
    config, bench = CONFIGS[name], simulated_bench(LANDSCAPE, Machine(0))
    measured = Measurement.of(bench.compare({"it": config}, draw_prompts(1500, 8), 1, 0), BASELINE, "it")
    logs = np.log(measured.speedups)
    # Ratios of totals weight prompts by length, which is independent of the speedup.
    error = logs.std() / np.sqrt(len(logs))
    assert np.log(measured.speedup) == pytest.approx(np.log(LANDSCAPE.speedup(config)), abs=3.5 * error)
    longest = 0 if config.method == "none" else config.num_speculative_tokens
    for sample in measured.candidate:
        rounds = sample.stats.rounds
        assert sum(r.committed for r in rounds) == sample.decoded_tokens == sample.tokens - 1
        assert all(0 <= r.accepted <= r.drafted <= longest and r.committed == r.accepted + 1 for r in rounds)


def test_machine_errors_are_noise_drift_and_stalls() -> None:
    machine = Machine(5, noise=0.02, drift=0.05)
    logs = np.log([machine.time(3.0) / 3.0 for _ in range(20_000)])
    assert logs.std() == pytest.approx(np.hypot(0.02, 0.05), rel=0.15)
    # Neighbours differ by two independent errors and a little drift.
    assert np.diff(logs).std() == pytest.approx(np.sqrt(2 * 0.02**2 + 2 * (1 - 0.98) * 0.05**2), rel=0.05)
    machine = Machine(5, noise=0.0, drift=0.0, stalls=0.1)
    times = [machine.time(1.0) for _ in range(5000)]
    assert set(times) == {1.0, 1.8}
    assert times.count(1.8) / len(times) == pytest.approx(0.1, abs=0.02)


def test_errors_of_the_predictor_are_small_and_correlated_for_similar_masks() -> None:
    prompts = draw_prompts(20, 0)
    predictor: SpeedupPredictor = SimulatedPredictor(LANDSCAPE, (1, 8), prompts)
    exact = SimulatedPredictor(LANDSCAPE, (1, 8), prompts, error=0.0)
    random = np.random.default_rng(0)
    masks = [DraftPlan.of(16, set(), set(random.choice(range(2, 14), 6, replace=False).tolist())) for _ in range(40)]
    predictions = predictor.predict(masks)
    errors = np.array([np.log(p.speedup / exact.speedup(p.config)) for p in predictions])
    assert 0.002 < np.abs(errors).mean() < 0.05
    pairs = list(itertools.combinations(range(len(masks)), 2))
    shared = [sum(np.logical_and(masks[a].mlp, masks[b].mlp)) for a, b in pairs]
    assert np.corrcoef(shared, [abs(errors[a] - errors[b]) for a, b in pairs])[0, 1] < -0.1


@pytest.mark.parametrize("name", ["masks", "lookups"])
def test_without_errors_the_predictor_equals_noiseless_measurements_on_its_prompts(name: str) -> None:
    config, prompts = CONFIGS[name], draw_prompts(12, 0)
    noiseless = simulated_bench(LANDSCAPE, Machine(0, noise=0.0, drift=0.0))
    measured = Measurement.of(noiseless.compare({"a": config}, prompts, 1, 0), BASELINE, "a")
    predictor = SimulatedPredictor(LANDSCAPE, (1, 8), prompts, error=0.0)
    assert predictor.can_predict(config)
    assert predictor.speedup(config) == pytest.approx(measured.speedup)
    assert predictor.speedup(config) != pytest.approx(LANDSCAPE.speedup(config), rel=0.002)

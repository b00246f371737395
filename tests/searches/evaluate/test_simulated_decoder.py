"""Tests of the simulated bench and predictor: long-run speedups are the true ones, and errors are as large as configured."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from layerskip import Measurement, SkipMask, SpeculativeConfig, StopRule
from searches.evaluate.landscape import Landscape
from searches.evaluate.simulated_decoder import Machine, SimulatedBench, SimulatedPredictor
from searches.evaluate.workload import draw_prompts, population
from searches.predict.predictor import SpeedupPredictor
from searches.predict.preparation import ScanSettings
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE, Bench

LANDSCAPE = Landscape.draw(3)
CONFIGS = {
    "thresholds": SpeculativeConfig("layer_skip", 5, mask="layers:2-9", stop=StopRule("threshold", 0.7)),
    "lengths": SpeculativeConfig("layer_skip", 3, mask="layers:3-6;mlp:8,11"),
    "lookups": SpeculativeConfig("prompt_lookup", 6, ngram_min=2, ngram_max=3),
    "plain": SpeculativeConfig(),
}


@pytest.fixture(scope="module")
def measured() -> dict[str, Measurement]:
    """Return the measurements of each configuration on many prompts."""
    bench: Bench = SimulatedBench(LANDSCAPE, Machine(0))
    rows = list(bench.compare(CONFIGS, draw_prompts(1500, 8), 1, 0))
    return {name: Measurement.of(rows, BASELINE, name) for name in CONFIGS}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_long_run_speedup_is_the_true_one(name: str, measured: dict[str, Measurement]) -> None:
    totals = measured[name]
    logs = np.log(totals.speedups)
    # Ratios of totals weight prompts by length, which is independent of the speedup.
    error = logs.std() / np.sqrt(len(logs))
    assert np.log(totals.speedup) == pytest.approx(np.log(LANDSCAPE.speedup(CONFIGS[name])), abs=3.5 * error)


def test_samples_are_those_of_a_decoder(measured: dict[str, Measurement]) -> None:
    for name, config in CONFIGS.items():
        for sample in measured[name].candidate:
            rounds = sample.stats.rounds
            assert sum(r.committed for r in rounds) == sample.decoded_tokens == sample.tokens - 1
            longest = 0 if config.kind == "none" else config.draft_length
            assert all(0 <= r.accepted <= r.drafted <= longest and r.committed == r.accepted + 1 for r in rounds)
    assert measured["lengths"].lossless.verdict == "exact"


def test_repeats_have_the_same_rounds_but_other_seconds() -> None:
    bench = SimulatedBench(LANDSCAPE, Machine(0))
    prompts = draw_prompts(2, 0)
    rows = list(bench.compare({"a": CONFIGS["lengths"], "b": CONFIGS["lengths"]}, prompts, 2, 0))
    assert len(rows) == 4
    assert {row["a"].prompt_id for row in rows} == {item.id for item in prompts}
    assert all(row["a"].stats == row["b"].stats and row["a"].decode_seconds != row["b"].decode_seconds for row in rows)
    assert rows[0]["a"].stats == rows[2]["a"].stats
    assert [row["a"].lossless.compared for row in rows] == [1, 1, 0, 0]


def test_a_better_draft_is_right_wherever_a_worse_one_is() -> None:
    better, worse = (SpeculativeConfig("layer_skip", 1, mask=mask) for mask in ("mlp:6", "layers:2-12"))
    rows = SimulatedBench(LANDSCAPE, Machine(0)).compare({"better": better, "worse": worse}, draw_prompts(50, 0), 1, 0)
    for row in rows:
        assert row["better"].stats.rounds[0].accepted >= row["worse"].stats.rounds[0].accepted


def test_machine_errors_are_independent_noise_and_common_drift() -> None:
    machine = Machine(5, noise=0.02, drift=0.05, persistence=0.99)
    logs = np.log([machine.time(3.0) / 3.0 for _ in range(20_000)])
    near = np.diff(logs)
    assert logs.std() == pytest.approx(np.hypot(0.02, 0.05), rel=0.15)
    # Neighbours differ by two independent errors and a little drift.
    assert near.std() == pytest.approx(np.sqrt(2 * 0.02**2 + 2 * (1 - 0.99) * 0.05**2), rel=0.05)


def test_plain_decoding_is_not_faster_than_itself(measured: dict[str, Measurement]) -> None:
    assert ttest_1samp(np.log(measured["plain"].speedups), 0.0).pvalue > 0.001


def test_stalls_are_as_frequent_as_configured() -> None:
    machine = Machine(5, noise=0.0, drift=0.0, stalls=0.1)
    times = [machine.time(1.0) for _ in range(5000)]
    assert set(times) == {1.0, 1.8}
    assert times.count(1.8) / len(times) == pytest.approx(0.1, abs=0.02)


def test_errors_of_the_predictor_are_small_and_correlated_for_similar_masks() -> None:
    space, prompts = SearchSpace(layers=16, stops=("length", "threshold")), draw_prompts(20, 0)
    predictor: SpeedupPredictor = SimulatedPredictor(LANDSCAPE, space, prompts, error=0.02)
    exact = SimulatedPredictor(LANDSCAPE, space, prompts, error=0.0, bias=0.0)
    random = np.random.default_rng(0)
    masks = [SkipMask.of(16, set(), set(random.choice(range(2, 14), 6, replace=False).tolist())) for _ in range(40)]
    predictions = predictor.predict(masks)
    errors = np.array([np.log(p.speedup / exact.speedup(p.config)) for p in predictions])
    assert 0.002 < np.abs(errors).mean() < 0.05
    assert [predictor.speedup(p.config) for p in predictions] == [p.speedup for p in predictions]
    assert predictor.agreements(masks) == [p.agreement for p in predictions]
    shared = [sum(np.logical_and(one.mlp, other.mlp)) for one in masks for other in masks if one != other]
    apart = [
        abs(a - b)
        for a, one in zip(errors, masks, strict=True)
        for b, other in zip(errors, masks, strict=True)
        if one != other
    ]
    assert np.corrcoef(shared, apart)[0, 1] < -0.1


@pytest.mark.parametrize("name", ["thresholds", "lengths", "lookups"])
def test_without_errors_the_predictor_equals_noiseless_measurements_on_its_prompts(name: str) -> None:
    config, prompts = CONFIGS[name], draw_prompts(12, 0)
    noiseless = SimulatedBench(LANDSCAPE, Machine(0, noise=0.0, drift=0.0))
    measured = Measurement.of(list(noiseless.compare({"a": config}, prompts, 1, 0)), BASELINE, "a")
    predictor = SimulatedPredictor(LANDSCAPE, SearchSpace(layers=16), prompts, error=0.0, bias=0.0)
    assert predictor.can_predict(config)
    assert predictor.speedup(config) == pytest.approx(measured.speedup)
    assert predictor.speedup(config) != pytest.approx(LANDSCAPE.speedup(config), rel=0.002)


def test_agreements_are_counted_on_a_sample_of_positions() -> None:
    masks = [SkipMask.parse(f"layers:2-{last}", 16) for last in range(3, 10)]
    difficulty, _, weights = population(LANDSCAPE.copying)
    truth = [float(weights @ np.exp(-loss * difficulty)) for loss in LANDSCAPE.losses(masks)]
    many, few = (
        SimulatedPredictor(
            LANDSCAPE, SearchSpace(layers=16), draw_prompts(prompts, 4), ScanSettings(screened_rows=rows)
        ).agreements(masks)
        for prompts, rows in ((2000, 50_000), (24, 128))
    )
    assert many == pytest.approx(truth, abs=0.01)
    assert all(round(share * 128, 6).is_integer() for share in few)
    assert few == sorted(few, reverse=True)  # a better draft is right wherever a worse one is
    assert few != pytest.approx(truth, abs=0.005)

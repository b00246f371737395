"""Calibration passes correct intervals and winners and fails wrong ones; simulated decoders have known optima."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from layerskip import DraftPlan, Measurement, SpeculativeConfig
from searches.evaluate.calibration import summarise
from searches.evaluate.simulated import PROSPECTS, Landscape, Machine, SimulatedPredictor, draw_prompts, simulated_bench
from searches.predict.mask_search import SpeedupPredictor
from searches.space.search_space import SearchSpace
from searches.study.bench import BASELINE
from tests.searches.conftest import Launch

FEW = ("itself.comparisons=40", "itself.prompts=12", "coverage.resamplings=40", "coverage.prompts=[12]")
PLANTED = (
    *("itself.comparisons=1", "itself.max_winners=null", "coverage.resamplings=0", "planted.seeds=2", "planted.hopeless=1"),
    *("planted.layers=8", "planted.prompts=30", "planted.min_hits=0", "planted.search.study.n_trials=12"),
)


@pytest.mark.system
@pytest.mark.parametrize("width", [1.0, 0.3])
def test_correct_intervals_pass_and_narrow_ones_fail(
    width: float, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    interval = Measurement.interval

    def scaled(self: Measurement) -> tuple[float, float]:
        low, high = interval(self)
        return self.speedup - width * (self.speedup - low), self.speedup + width * (high - self.speedup)

    monkeypatch.setattr(Measurement, "interval", scaled)
    limits = ("coverage.minimum=0.85", "itself.max_winners=0.15")
    done = launch("evaluate.calibration", *FEW, *limits, "record=record.json", cwd=tmp_path)
    assert done.returncode == (0 if width == 1.0 else 4), done.stdout + done.stderr
    counts = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))["counts"]
    assert [(count["of"], count["passed"]) for count in counts] == [(40, width == 1.0)] * 3
    assert all(count["name"] in done.stdout for count in counts)
    assert ("MISSED" in done.stdout) == (width < 1)


@pytest.mark.system
def test_searches_are_judged_by_the_known_optimum(tmp_path: Path, launch: Launch) -> None:
    done = launch("evaluate.calibration", *PLANTED, "record=record.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert [count["of"] for count in record["counts"]] == [1, 3, 2]
    for search in record["searches"]:
        assert search["winner_speedup"] <= search["best_speedup"] * 1.001
        assert not search["slower"]
    assert (record["searches"][2]["best"], record["searches"][2]["winner"]) == ("no drafting", "no drafting")


def test_slower_exports_are_tolerated_on_close_landscapes_only() -> None:
    def passed(*outcomes: tuple[str, bool, bool]) -> list[bool]:
        found = [dict(zip(("prospect", "hit", "slower"), outcome, strict=True)) for outcome in outcomes]
        return [count.passed for count in summarise(found, 0.95, 0.05)]

    hit, slower, level = ("hopeful", True, False), ("close", False, True), ("close", False, False)
    assert passed(hit, slower, *[level] * 19) == [True, True, True]
    assert passed(hit, *[slower] * 2, *[level] * 18) == [True, True, False]
    assert passed(("hopeful", False, True)) == [False, False]


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

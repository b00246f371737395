"""Tests of the landscape: its optimum against all masks, and its long-run speedups."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from layerskip import ConfigError, SkipMask, SpeculativeConfig, StopRule
from searches.evaluate.landscape import Landscape
from searches.evaluate.workload import CATEGORIES, draw_prompts
from searches.space.search_space import SearchSpace

SPACE = SearchSpace(layers=8, kinds=("none", "layer_skip", "prompt_lookup"), stops=("length", "threshold"))


@pytest.mark.parametrize("seed", [1, 2])
def test_the_best_configuration_is_the_best_of_all_masks(seed: int) -> None:
    landscape = Landscape.draw(seed, layers=8)
    masks = []
    for bits in itertools.product((False, True), repeat=2 * len(SPACE.skippable)):
        attention = {layer for layer, skip in zip(SPACE.skippable, bits[::2], strict=True) if skip}
        mlp = {layer for layer, skip in zip(SPACE.skippable, bits[1::2], strict=True) if skip}
        masks.append(SkipMask.of(8, attention, mlp))
    space = SearchSpace(layers=8, kinds=("layer_skip",), stops=("length", "threshold"))
    best, speedup = landscape.best(space)
    speedups = [each for _, each in landscape.best_drafts(masks, space)]
    assert speedup == pytest.approx(max(1.0, *speedups), rel=1e-3)
    assert landscape.speedup(best) == speedup


def test_interpolated_speedups_are_close_to_exact_ones() -> None:
    landscape = Landscape.draw(5)
    space = SearchSpace(layers=16, stops=("length", "threshold"))
    masks = [SkipMask.parse(text, 16) for text in ("", "layers:2-13", "attention:3;mlp:8", "layers:4-9;mlp:11")]
    for config, speedup in landscape.best_drafts(masks, space):
        assert landscape.speedup(config) == pytest.approx(speedup, rel=1e-3)


def test_skipped_neighbours_lose_less_than_distant_sublayers() -> None:
    landscape = Landscape(0, Landscape.draw(0, 8).profile, (0.1,) * 8, (0.2,) * 8, (0.25,) * 8)
    together, apart, single = landscape.losses(
        [SkipMask.parse(text, 8) for text in ("layers:2-3", "layers:2,5", "layers:2")]
    )
    assert single == pytest.approx(0.3 - 0.25 * np.sqrt(0.1 * 0.2))
    assert apart == pytest.approx(2 * single)
    assert together == pytest.approx(2 * single - 0.25 * 0.1 - 0.25 * 0.2)


def test_a_draft_that_is_always_right_is_always_accepted() -> None:
    profile = Landscape.draw(0, 8).profile
    landscape = Landscape(0, profile, (1e-12,) * 8, (1e-12,) * 8, (0.0,) * 8)
    config = SpeculativeConfig("layer_skip", 3, mask="layers:2-5")
    # 24, 36 and 48 tokens are multiples of the four tokens of a round.
    draft_seconds = profile.draft_seconds(SkipMask.parse(config.mask, 8))
    assert landscape.speedup(config) == pytest.approx(
        4 * profile.verify_seconds[0] / (3 * draft_seconds + profile.verify_seconds[3])
    )


def test_an_adaptive_threshold_keeps_its_start_value() -> None:
    landscape = Landscape.draw(0)
    fixed, adaptive = (
        SpeculativeConfig("layer_skip", 4, mask="layers:3-8", stop=StopRule(k, 0.7)) for k in ("threshold", "adaptive")
    )
    assert landscape.speedup(fixed) == landscape.speedup(adaptive)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_beats_plain_decoding_on_a_hopeless_landscape(seed: int) -> None:
    assert Landscape.draw(seed, 8, "hopeless").best(SPACE) == (SpeculativeConfig(), 1.0)


@pytest.mark.parametrize("seed", range(3))
def test_many_configurations_are_about_as_fast_as_plain_decoding_on_a_close_landscape(seed: int) -> None:
    landscape = Landscape.draw(seed, 8, "close")
    assert landscape.best(SPACE)[1] < 1.06
    near = [config for config in SPACE.lookups() if 0.95 < landscape.speedup(config) < 1.02]
    assert len(near) > 5


def test_a_draft_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_model"):
        Landscape.draw(0).speedup(SpeculativeConfig("draft_model", draft="some/draft"))


def test_prompts_are_of_all_kinds_and_keep_their_workload() -> None:
    landscape, prompts = Landscape.draw(0), draw_prompts(600, 3)
    kinds = [item.category for item in prompts]
    assert all(60 <= kinds.count(kind) <= 140 for kind in CATEGORIES)
    assert [landscape.work(item) for item in prompts] == [landscape.work(item) for item in draw_prompts(600, 3)]
    assert len({landscape.work(item).difficulty for item in (*prompts, *draw_prompts(600, 4))}) == 1200

"""Proposals against every mask there is, on a model small enough to try them all."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from layerskip import SkipMask, SpeculativeConfig
from layerskip.costs.cost_model import NO_AIDS, Aids, CostProfile
from searches.predict.mask_search import expected_speedup, published_masks, run
from searches.predict.oracle import Prediction
from searches.predict.proposals import ProposalSettings, propose, propose_all, propose_bridged
from searches.space.search_space import SearchSpace

LAYERS = 8
PROFILE = CostProfile(
    100, 0.002, 0.0001, (0.0004,) * LAYERS, (0.0012,) * LAYERS, 0.0, 0.0, tuple(0.015 * (1 + 0.02 * g) for g in range(7))
)

LONG_PROFILE = CostProfile(100, 0.2, 0.0, (0.01,) * 28, (0.02,) * 28, 0.0, 0.0, (1.0,) * 7)


@dataclass
class Landscape:
    """An oracle whose losses add up, but for neighbours, which lose less together."""

    seed: int
    asked: list[SkipMask] = field(default_factory=list)
    layers: int = LAYERS
    profile: CostProfile = PROFILE
    prompts: frozenset[str] = frozenset("x")

    def agreement(self, mask: SkipMask) -> float:
        source = random.Random(self.seed)
        losses = {(kind, i): source.uniform(0.005, 0.2) for kind in ("attention", "mlp") for i in range(LAYERS)}
        loss = sum(losses[kind, i] for kind, i in losses if getattr(mask, kind)[i])
        together = sum(mask.attention[i] and mask.mlp[i] and mask.attention[i + 1] for i in range(LAYERS - 1))
        return math.exp(-loss + 0.02 * together)

    def agreements(self, masks: Sequence[SkipMask]) -> list[float]:
        self.asked += masks
        return [self.agreement(mask) for mask in masks]

    def predict(self, masks: Sequence[SkipMask]) -> list[Prediction]:
        return [
            Prediction(
                SpeculativeConfig("layer_skip", 2, mask=mask.format()),
                expected_speedup(self, mask, self.agreement(mask), (1, 6))[0],
                self.agreement(mask),
            )
            for mask in masks
        ]

    def foretells(self, config: SpeculativeConfig) -> bool:
        return config.kind == "layer_skip" and config.stop.kind == "length" and not config.siblings and config.lossless

    def aids(self, mask: SkipMask) -> Aids:
        return NO_AIDS

    def knows(self, config: SpeculativeConfig) -> bool:
        return not config.bridge

    def speedup(self, config: SpeculativeConfig) -> float:
        (found,) = self.predict([SkipMask.parse(config.mask, LAYERS)])
        return found.speedup


@pytest.mark.parametrize("seed", range(6))
def test_proposals_are_close_to_the_best_of_all_masks(seed: int) -> None:
    oracle, space = Landscape(seed), SearchSpace(LAYERS, protect_first=2, protect_last=1, skip_length=(1, 6))
    found = propose(oracle, space, ProposalSettings(screened=150, scanned=8, enqueued=3))
    bits = [(False, True) if i in space.skippable else (False,) for i in range(LAYERS)]
    every = [SkipMask(a, m) for a in itertools.product(*bits) for m in itertools.product(*bits)]
    best = max(expected_speedup(oracle, mask, oracle.agreement(mask), (1, 6))[0] for mask in every)
    assert found[0].speedup == pytest.approx(best, rel=0.005)
    assert len({prediction.config for prediction in found}) == 3
    assert len(oracle.asked) == len(set(oracle.asked)) <= 150


@dataclass
class OneRun(Landscape):
    """Layers 9 to 19 skipped whole lose little, as they were measured on a model of 28; every other skip loses much."""

    layers: int = 28
    profile: CostProfile = LONG_PROFILE

    def agreement(self, mask: SkipMask) -> float:
        skipped = [i for i in range(28) if mask.attention[i] and mask.mlp[i]]
        odd = sum(mask.attention[i] != mask.mlp[i] for i in range(28))
        outside = sum(not 9 <= i <= 19 for i in skipped)
        missing = 0 if not skipped else sum(i not in skipped for i in range(9, 20))
        return math.exp(-0.15 * bool(skipped) - 0.1 * odd - 0.3 * outside - 0.05 * missing)


def test_a_long_run_is_found_where_short_ones_do_not_pay() -> None:
    oracle = OneRun(0)
    space = SearchSpace(28, skip_length=(1, 6))
    short = [
        expected_speedup(oracle, m, oracle.agreement(m), (1, 6))[0] for m in (run(28, 9, 1), run(28, 9, 2), run(28, 12, 3))
    ]
    assert max(short) < expected_speedup(oracle, SkipMask.none(28), 1.0, (1, 6))[0]
    found = propose(oracle, space, ProposalSettings())
    assert found[0].config.mask == "layers:9-19"


def test_all_runs_are_asked_about_unless_the_budget_is_smaller() -> None:
    space = SearchSpace(28, skip_length=(1, 6))
    first, last = space.skippable[0], space.skippable[-1]
    every = {run(28, begin, length) for begin in space.skippable for length in range(1, last - begin + 2)}
    assert len(every) == (last - first + 1) * (last - first + 2) // 2
    few, many = OneRun(0), OneRun(0)
    propose(few, space, ProposalSettings(screened=250))
    propose(many, space, ProposalSettings())
    assert not every <= set(few.asked)
    assert every <= set(many.asked)
    assert len(many.asked) <= 200 + len(every)


@dataclass
class OneMask(Landscape):
    """One mask loses next to nothing, bridged, and others the more, the more sub-layers they differ from it by."""

    layers: int = 28
    profile: CostProfile = LONG_PROFILE
    best: SkipMask = field(default_factory=lambda: run(28, 2, 11))

    def agreement(self, mask: SkipMask) -> float:
        flags = zip((*mask.attention, *mask.mlp), (*self.best.attention, *self.best.mlp), strict=True)
        return math.exp(-0.02 - 0.15 * sum(one != other for one, other in flags))


@pytest.mark.parametrize("first", [2, 3, 8, 15, 21])
@pytest.mark.parametrize("length", [5, 11])
def test_a_bridged_run_is_found_to_the_layer(first: int, length: int) -> None:
    """Odd lengths and late starts are on no grid that is asked about; ends move there."""
    oracle, space, heard = OneMask(0, best=run(28, first, min(length, 26 - first))), SearchSpace(28, skip_length=(1, 6)), []
    found = propose_bridged(oracle, space, ProposalSettings(), lambda: heard.append(1))
    assert found[0].config.mask == oracle.best.format()
    assert len(heard) == len(oracle.asked) == len(set(oracle.asked)) <= 90  # each is fitted first, which takes seconds


@pytest.mark.parametrize("mask", ["attention:8", "mlp:20"])
def test_a_single_bridged_sublayer_is_asked_about(mask: str) -> None:
    oracle, space = OneMask(0, best=SkipMask.parse(mask, 28)), SearchSpace(28, skip_length=(1, 6))
    assert propose_bridged(oracle, space, ProposalSettings())[0].config.mask == mask


def test_a_mask_that_the_space_names_is_asked_about_bridged() -> None:
    """A run that skips attention in one half and MLPs in the other is on no grid."""
    oracle = OneMask(0, best=SkipMask.parse("attention:5-9;mlp:10-14", 28))
    space = SearchSpace(28, skip_length=(1, 6), masks=[oracle.best.format()])
    assert propose_bridged(oracle, space, ProposalSettings())[0].config.mask == oracle.best.format()
    assert oracle.asked[0] == oracle.best


@pytest.mark.parametrize("worth", [0.5, 1.5])
def test_masks_are_tried_in_the_order_of_what_they_are_worth_bridged_or_not(worth: float) -> None:
    space = SearchSpace(28, kinds=("none", "layer_skip"), skip_length=(1, 6), siblings=0)

    class Worth(OneMask):
        def predict(self, masks: Sequence[SkipMask]) -> list[Prediction]:
            return [replace(found, speedup=worth * found.speedup) for found in super().predict(masks)]

    plain, other = OneMask(0), Worth(0, best=run(28, 3, 9))
    settings = ProposalSettings(enqueued=3)
    for how in ({"bridged": [other]}, {"narrowed": [other]}):
        found = propose_all(plain, space, settings, **how)  # type: ignore[arg-type]
        assert len(found) == 6
        assert (found[0].mask == run(28, 3, 9).format()) is (worth > 1)


def test_bridged_masks_keep_a_small_budget_and_look_everywhere() -> None:
    oracle, space = OneMask(0), SearchSpace(28, skip_length=(1, 6))
    propose_bridged(oracle, space, ProposalSettings(screened=24))
    assert len(oracle.asked) == len(set(oracle.asked)) <= 24
    sizes = [mask.attention.count(True) for mask in oracle.asked if mask.attention == mask.mlp]
    assert max(sizes) > 20
    assert {mask.attention.index(True) for mask in oracle.asked if True in mask.attention} >= {2, 3, 8, 14, 20}
    assert any(mask.attention != mask.mlp for mask in oracle.asked)


def test_a_small_budget_is_kept() -> None:
    oracle, space = Landscape(0), SearchSpace(LAYERS)
    heard: list[int] = []
    assert len(propose(oracle, space, ProposalSettings(screened=3), lambda: heard.append(1))) == 3
    assert len(heard) == len(oracle.asked) == 3


@dataclass
class Watched(Landscape):
    """Knows after how many questions which mask was scanned."""

    scanned: dict[SkipMask, int] = field(default_factory=dict)

    def predict(self, masks: Sequence[SkipMask]) -> list[Prediction]:
        self.scanned |= {mask: len(self.asked) for mask in masks}
        return super().predict(masks)


def test_who_listens_hears_of_a_whole_scan_long_before_the_search_ends() -> None:
    heard: list[tuple[int, str]] = []
    oracle, space = Watched(0), SearchSpace(LAYERS, protect_first=2, protect_last=1, skip_length=(1, 6))
    settings = ProposalSettings(screened=150, scanned=8, enqueued=3)
    found = propose(oracle, space, settings, on_best=lambda config: heard.append((len(oracle.asked), config.mask)))
    assert len(oracle.scanned) == settings.scanned
    assert min(oracle.scanned.values()) < len(oracle.asked) / 2
    assert heard[0] == (1, "")  # that nothing be skipped is asked about first, and alone
    assert heard[-1][1] == found[0].config.mask


def test_expected_speedup_is_the_papers() -> None:
    """arXiv 2211.17192, theorem 3.8, with flat verification: (1 - a^(g+1)) / ((1 - a) (g c + 1)), at its best g."""
    profile = CostProfile(1, 0.1, 0.0, (0.1, 0.1), (0.1, 0.1), 0.0, 0.0, (0.5,) * 6)
    oracle, mask = Landscape(0), SkipMask.parse("layers:1", 2)
    oracle.layers, oracle.profile = 2, profile
    alpha, cost = 0.8, 0.3 / 0.5
    expected = max((1 - alpha ** (g + 1)) / ((1 - alpha) * (g * cost + 1)) for g in range(1, 5))
    assert expected_speedup(oracle, mask, alpha, (1, 4))[0] == pytest.approx(expected)
    assert expected_speedup(oracle, mask, 0.0, (3, 4))[1] == 3
    assert profile.bound(mask) == pytest.approx(max((g + 1) / (g * cost + 1) for g in range(1, 6)))


def test_published_masks_fit_any_depth() -> None:
    for layers in (6, 30):
        masks = published_masks(layers, range(1, layers - 1))
        assert len(masks) == 25
        for mask in masks:
            assert mask.layers == layers
            assert not (mask.attention[0] or mask.mlp[0] or mask.attention[-1] or mask.mlp[-1])
        assert any(mask.skipped for mask in masks)

"""Proposals compared with all masks of a small model."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from layerskip import SkipMask, SpeculativeConfig
from layerskip.costs.cost_model import NO_EXTRAS, CostProfile, DraftExtras
from searches.predict.mask_search import expected_speedup, run
from searches.predict.predictor import Prediction
from searches.predict.proposals import ProposalSettings, propose, propose_all, propose_runs
from searches.space.search_space import SearchSpace

LAYERS = 8
PROFILE = CostProfile(
    100, 0.002, 0.0001, (0.0004,) * LAYERS, (0.0012,) * LAYERS, 0.0, 0.0, tuple(0.015 * (1 + 0.02 * g) for g in range(7))
)

LONG_PROFILE = CostProfile(100, 0.2, 0.0, (0.01,) * 28, (0.02,) * 28, 0.0, 0.0, (1.0,) * 7)

LENGTHS = {"layer_skip": {"num_speculative_tokens": (1, 6)}}


@dataclass
class Landscape:
    """A predictor whose losses add up, except that adjacent sub-layers lose less together."""

    seed: int
    screened: list[SkipMask] = field(default_factory=list)
    layers: int = LAYERS
    profile: CostProfile = PROFILE
    prompts: frozenset[str] = frozenset("x")
    screened_together: int = 8

    def agreement(self, mask: SkipMask) -> float:
        source = random.Random(self.seed)
        losses = {(sublayer, i): source.uniform(0.005, 0.2) for sublayer in ("attention", "mlp") for i in range(LAYERS)}
        loss = sum(losses[method, i] for method, i in losses if getattr(mask, method)[i])
        together = sum(mask.attention[i] and mask.mlp[i] and mask.attention[i + 1] for i in range(LAYERS - 1))
        return math.exp(-loss + 0.02 * together)

    def sharpen(self) -> None:
        pass

    def agreements(self, masks: Sequence[SkipMask]) -> list[float]:
        self.screened += masks
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

    def can_predict(self, config: SpeculativeConfig) -> bool:
        return config.method == "layer_skip" and config.stop.method == "length" and not config.siblings and config.lossless

    def extras(self, mask: SkipMask) -> DraftExtras:
        return NO_EXTRAS

    def matches(self, config: SpeculativeConfig) -> bool:
        return not config.fitted

    def speedup(self, config: SpeculativeConfig) -> float:
        (found,) = self.predict([SkipMask.parse(config.mask, LAYERS)])
        return found.speedup


@pytest.mark.parametrize("seed", range(6))
def test_proposals_are_close_to_the_best_of_all_masks(seed: int) -> None:
    predictor, space = Landscape(seed), SearchSpace(LAYERS, protect_first=2, protect_last=1, ranges=LENGTHS)
    found = propose(predictor, space, ProposalSettings(screened=150, scanned=8, enqueued=3))
    bits = [(False, True) if i in space.skippable else (False,) for i in range(LAYERS)]
    every = [SkipMask(a, m) for a in itertools.product(*bits) for m in itertools.product(*bits)]
    best = max(expected_speedup(predictor, mask, predictor.agreement(mask), (1, 6))[0] for mask in every)
    assert found[0].speedup == pytest.approx(best, rel=0.005)
    assert len({prediction.config for prediction in found}) == 3
    assert len(predictor.screened) == len(set(predictor.screened)) <= 150


@dataclass
class OneRun(Landscape):
    """Only the run of layers 9 to 19 loses little, as measured on a model of 28 layers."""

    layers: int = 28
    profile: CostProfile = LONG_PROFILE

    def agreement(self, mask: SkipMask) -> float:
        skipped = [i for i in range(28) if mask.attention[i] and mask.mlp[i]]
        odd = sum(mask.attention[i] != mask.mlp[i] for i in range(28))
        outside = sum(not 9 <= i <= 19 for i in skipped)
        missing = 0 if not skipped else sum(i not in skipped for i in range(9, 20))
        return math.exp(-0.15 * bool(skipped) - 0.1 * odd - 0.3 * outside - 0.05 * missing)


def test_a_long_run_is_found_if_short_ones_do_not_pay_off() -> None:
    predictor = OneRun(0)
    space = SearchSpace(28, ranges=LENGTHS)
    some = [run(28, 9, 1), run(28, 9, 2), run(28, 12, 3), SkipMask.none(28)]
    *short, plain = (expected_speedup(predictor, mask, predictor.agreement(mask), (1, 6))[0] for mask in some)
    assert max(short) < plain
    found = propose(predictor, space, ProposalSettings())
    assert found[0].config.mask == "layers:9-19"
    every = {run(28, a, b - a) for a in space.skippable for b in range(a + 1, space.skippable[-1] + 2)}
    assert every <= set(predictor.screened) and len(predictor.screened) <= 200 + len(every)
    propose(small := OneRun(0), space, ProposalSettings(screened=30))
    assert len(small.screened) == len(set(small.screened)) == 30


@dataclass
class OneMask(Landscape):
    """One mask loses almost nothing with bridges, and others more for each sub-layer that differs from it."""

    layers: int = 28
    profile: CostProfile = LONG_PROFILE
    best: SkipMask = field(default_factory=lambda: run(28, 2, 11))

    def agreement(self, mask: SkipMask) -> float:
        flags = zip((*mask.attention, *mask.mlp), (*self.best.attention, *self.best.mlp), strict=True)
        return math.exp(-0.02 - 0.15 * sum(one != other for one, other in flags))


@pytest.mark.parametrize(
    "mask",
    ["layers:2-6", "layers:2-12", "layers:3-13", "layers:8-12", "layers:15-25", "layers:21-25", "attention:8", "mlp:20"],
)
def test_a_bridged_run_or_sublayer_is_found_exactly(mask: str) -> None:
    """Odd lengths and late starts are on no screened grid; moved ends find them."""
    predictor, calls = OneMask(0, best=SkipMask.parse(mask, 28)), list[int]()
    found = propose_runs(predictor, SearchSpace(28, ranges=LENGTHS), ProposalSettings(), lambda: calls.append(1))
    assert found[0].config.mask == mask
    assert len(calls) == len(predictor.screened) == len(set(predictor.screened)) <= 90  # each takes a fit of some seconds


def test_masks_of_the_space_are_screened_with_bridges() -> None:
    """A run that skips attention in one half and MLPs in the other is on no screened grid."""
    predictor = OneMask(0, best=SkipMask.parse("attention:5-9;mlp:10-14", 28))
    space = SearchSpace(28, ranges=LENGTHS, masks=[predictor.best.format()])
    assert propose_runs(predictor, space, ProposalSettings())[0].config.mask == predictor.best.format()
    assert predictor.screened[0] == predictor.best


@pytest.mark.parametrize("worth", [0.5, 1.5])
def test_proposals_are_ordered_by_predicted_speedup(worth: float) -> None:
    space = SearchSpace(28, methods=("none", "layer_skip"), ranges=LENGTHS).narrowed(siblings=(0, 0))

    class Scaled(OneMask):
        def predict(self, masks: Sequence[SkipMask]) -> list[Prediction]:
            return [replace(found, speedup=worth * found.speedup) for found in super().predict(masks)]

    plain, other = OneMask(0), Scaled(0, best=run(28, 3, 9))
    settings = ProposalSettings(enqueued=3)
    for group in ({"filled": [other]}, {"narrowed": [other]}):
        found = propose_all(plain, space, settings, **group)  # type: ignore[arg-type]
        assert len(found) == 6
        assert (found[0].mask == run(28, 3, 9).format()) is (worth > 1)


def test_a_small_budget_of_bridged_masks_covers_the_whole_depth() -> None:
    predictor, space = OneMask(0), SearchSpace(28, ranges=LENGTHS)
    propose_runs(predictor, space, ProposalSettings(screened=24))
    assert len(predictor.screened) == len(set(predictor.screened)) <= 24
    sizes = [mask.attention.count(True) for mask in predictor.screened if mask.attention == mask.mlp]
    assert max(sizes) > 20
    assert {mask.attention.index(True) for mask in predictor.screened if True in mask.attention} >= {2, 3, 8, 14, 20}
    assert any(mask.attention != mask.mlp for mask in predictor.screened)


@dataclass
class Recording(Landscape):
    """Predictor that records after how many screened masks each mask was scanned."""

    scanned: dict[SkipMask, int] = field(default_factory=dict)

    def predict(self, masks: Sequence[SkipMask]) -> list[Prediction]:
        self.scanned |= {mask: len(self.screened) for mask in masks}
        return super().predict(masks)


def test_scans_are_reported_long_before_the_search_ends() -> None:
    calls: list[tuple[int, str]] = []
    predictor, space = Recording(0), SearchSpace(LAYERS, protect_first=2, protect_last=1, ranges=LENGTHS)
    settings = ProposalSettings(screened=150, scanned=8, enqueued=3)
    found = propose(predictor, space, settings, on_best=lambda config: calls.append((len(predictor.screened), config.mask)))
    assert len(predictor.scanned) == settings.scanned
    assert min(predictor.scanned.values()) < len(predictor.screened) / 2
    assert calls[0] == (1, "")  # the empty mask is screened first, alone
    assert calls[-1][1] == found[0].config.mask


def test_expected_speedup_matches_the_paper() -> None:
    """arXiv 2211.17192, theorem 3.8, verification cost constant: (1 - a^(g+1)) / ((1 - a) (g c + 1)), for the best g."""
    profile = CostProfile(1, 0.1, 0.0, (0.1, 0.1), (0.1, 0.1), 0.0, 0.0, (0.5,) * 6)
    predictor, mask = Landscape(0), SkipMask.parse("layers:1", 2)
    predictor.layers, predictor.profile = 2, profile
    alpha, cost = 0.8, 0.3 / 0.5
    expected = max((1 - alpha ** (g + 1)) / ((1 - alpha) * (g * cost + 1)) for g in range(1, 5))
    assert expected_speedup(predictor, mask, alpha, (1, 4))[0] == pytest.approx(expected)
    assert expected_speedup(predictor, mask, 0.0, (3, 4))[1] == 3
    assert profile.speedup_bound(mask) == pytest.approx(max((g + 1) / (g * cost + 1) for g in range(1, 6)))

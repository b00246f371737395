"""Every kind of screened mask, each on a landscape that no other kind solves."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from layerskip import SkipMask
from layerskip.costs.cost_model import CostProfile
from searches.predict.mask_search import MaskSearch, published_masks, run
from searches.predict.proposals import ProposalSettings, propose, propose_all
from searches.space.search_space import SearchSpace
from tests.searches.predict.test_proposals import Landscape

Parts = frozenset[str]
Saved = dict[str, float]

LENGTHS = {"layer_skip": {"num_speculative_tokens": (1, 6)}}


def _parts(mask: SkipMask) -> Parts:
    """Return the skipped sub-layers, each formatted as the mask that skips only it."""
    kinds = {"attention": mask.attention, "mlp": mask.mlp}
    return frozenset(f"{kind}:{i}" for kind, flags in kinds.items() for i, skip in enumerate(flags) if skip)


def _profile(layers: int, saved: Saved, other: float = 0.02) -> CostProfile:
    """Return a profile in which some sub-layers save the given seconds, and all others ``other``."""
    costs = [tuple(saved.get(f"{kind}:{i}", other) for i in range(layers)) for kind in ("attention", "mlp")]
    return CostProfile(100, 0.1, 0.0, costs[0], costs[1], 0.0, 0.0, (1.0,) * 7)


@dataclass
class LossLandscape(Landscape):
    """A landscape whose lost log agreement is a given function of the mask."""

    loss: Callable[[SkipMask], float] = field(default=lambda mask: 0.0)

    def agreement(self, mask: SkipMask) -> float:
        return math.exp(-self.loss(mask))


def _landscape(layers: int, loss: Callable[[SkipMask], float], saved: Saved | None = None) -> LossLandscape:
    return LossLandscape(0, layers=layers, profile=_profile(layers, saved or {}), loss=loss)


def _only(best: SkipMask) -> LossLandscape:
    """Return a landscape on which every other mask that skips anything loses nearly all agreement."""
    return _landscape(best.layers, lambda mask: 3.0 * (mask not in (best, SkipMask.none(best.layers))))


def _space(layers: int) -> SearchSpace:
    return SearchSpace(layers, protect_first=0, protect_last=0, ranges=LENGTHS)


def additive() -> tuple[LossLandscape, SkipMask]:
    """Solve with a knapsack only: the cheapest sub-layer excludes three that save more together within a loss of 0.1."""
    saved = {"attention:1": 0.3, "attention:3": 0.17, "mlp:5": 0.175, "attention:8": 0.18}
    losses = {"attention:1": 0.045, "attention:3": 0.035, "mlp:5": 0.035, "attention:8": 0.035}

    def loss(mask: SkipMask) -> float:
        lost = sum(losses.get(part, 0.09) for part in _parts(mask))
        return lost if lost < 0.107 else 9.0

    return _landscape(10, loss, saved), SkipMask.parse("attention:3,8;mlp:5", 10)


def interacting() -> tuple[LossLandscape, SkipMask]:
    """Solve by adding greedily only: five sub-layers combine, each with a gain.

    The cheapest one and the best single one combine with no other, which misleads sums. Four others lose least and save
    almost nothing.
    """
    alone = {"mlp:0": 0.001, "attention:0": 0.2}
    good = {f"attention:{i}": 0.02 for i in (4, 6, 8, 10, 11)}
    idle = {f"mlp:{i}": 0.015 for i in (2, 5, 7, 9)}

    def loss(mask: SkipMask) -> float:
        parts = _parts(mask)
        clash = len(parts) > 1 and bool(parts & alone.keys())
        return sum((alone | good | idle).get(part, 1.0) for part in parts) + 9.0 * clash

    saved = {"mlp:0": 0.01, "attention:0": 0.5} | dict.fromkeys(good, 0.1) | dict.fromkeys(idle, 0.001)
    return _landscape(12, loss, saved), SkipMask.of(12, {4, 6, 8, 10, 11}, set())


def _apart(one: SkipMask, other: SkipMask) -> int:
    return len(_parts(one) ^ _parts(other))


def flipped() -> tuple[LossLandscape, SkipMask]:
    """Solve with flips only: a run with two kept sub-layers far apart; single skips reveal nothing."""
    best = SkipMask.of(14, {3, 4, 5, 6, 8, 9, 10}, {3, 4, 6, 7, 8, 9, 10})

    def loss(mask: SkipMask) -> float:
        return 3.0 if mask.skipped == 1 else 0.02 + 0.15 * _apart(mask, best)

    return _landscape(14, loss), best


def swapped() -> tuple[LossLandscape, SkipMask]:
    """Solve with swaps only: a run with one sub-layer in place of another; another number of sub-layers loses much."""
    best = SkipMask.of(14, {3, 4, 5, 6, 8, 9, 10, 12}, {3, 4, 5, 6, 7, 8, 9, 10})

    def loss(mask: SkipMask) -> float:
        if mask.skipped == 1:  # the dearest and the cheapest one
            return {"attention:7": 3.0, "attention:12": 0.5}.get(mask.format(), 2.0)
        return 0.02 + 0.1 * _apart(mask, best) + 1.0 * (mask.skipped != best.skipped)

    return _landscape(14, loss), best


def contiguous() -> tuple[LossLandscape, SkipMask]:
    """Solve with runs only: one run whose parts do not pay off."""
    best = run(14, 4, 6)
    return _only(best), best


def published() -> tuple[LossLandscape, SkipMask]:
    """Solve with published masks only: one for 40 layers, rescaled to 21."""
    best = published_masks(21, range(21))[1]
    return _only(best), best


@pytest.mark.parametrize(
    ("landscape", "part"),
    [
        (additive, "MaskSearch._knapsacks"),
        (interacting, "MaskSearch._add_greedily"),
        (flipped, "MaskSearch.neighbours"),
        (swapped, "MaskSearch.neighbours"),
        (contiguous, "MaskSearch._screen_all_runs"),
        (published, "published_masks"),
    ],
)
def test_every_kind_finds_a_mask_that_no_other_finds(
    landscape: Callable[[], tuple[LossLandscape, SkipMask]], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor, best = landscape()
    space = _space(predictor.layers)
    assert propose(predictor, space, ProposalSettings())[0].config.mask == best.format()
    monkeypatch.setattr(f"searches.predict.mask_search.{part}", lambda *_: [])
    assert propose(predictor, space, ProposalSettings())[0].config.mask != best.format()


@pytest.mark.parametrize("seed", range(4))
def test_knapsacks_are_optimal(seed: int) -> None:
    """Compared with all choices of ten sub-layers for every budget; losses are multiples of the step."""
    source, budgets = random.Random(seed), (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
    names = [f"{kind}:{i}" for kind in ("attention", "mlp") for i in range(5)]
    steps, saved = {name: source.randint(1, 40) for name in names}, {name: source.uniform(0.01, 0.1) for name in names}
    predictor = _landscape(5, lambda mask: 0.005 * sum(steps[part] for part in _parts(mask)), saved)
    next(MaskSearch(predictor, _space(5), 1000, lambda: None).explore())
    screened = {_parts(mask) for mask in predictor.screened}
    choices = [frozenset(some) for count in range(11) for some in itertools.combinations(names, count)]
    for budget in budgets:
        within = [some for some in choices if sum(steps[name] for name in some) <= round(-math.log(1 - budget) / 0.005)]
        assert max(within, key=lambda some: sum(saved[name] for name in some)) in screened
    assert len(screened) <= 1 + len(names) + len(budgets)


def test_further_masks_are_screened() -> None:
    """Those of CLaSp are such masks; bridged masks are found in another way."""
    odd = SkipMask.parse("attention:2,5,11;mlp:3,8", 14)
    plain, narrowed = _only(odd), _only(odd)
    space = _space(14).narrowed(siblings=(0, 0))
    assert propose(plain, space, ProposalSettings())[0].config.mask != odd.format()
    assert propose(plain, space, ProposalSettings(), also=[odd])[0].config.mask == odd.format()
    both = propose_all(plain, space, ProposalSettings(enqueued=1), also=[odd], narrowed=[narrowed])
    assert [config.mask for config in both if config.method == "layer_skip"] == [odd.format()] * 2

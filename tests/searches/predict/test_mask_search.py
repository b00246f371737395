"""Every kind of mask that is asked about, each on a landscape that no other kind solves."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from layerskip import SkipMask
from layerskip.costs.cost_model import CostProfile
from searches.predict.mask_search import MaskSearch, published_masks, run
from searches.predict.proposals import ProposalSettings, propose, propose_all
from searches.space.search_space import SearchSpace
from tests.searches.predict.test_proposals import Landscape

Parts = frozenset[str]
Saved = dict[str, float]


def _parts(mask: SkipMask) -> Parts:
    """The sub-layers that it skips, each as a mask of it alone is written."""
    kinds = {"attention": mask.attention, "mlp": mask.mlp}
    return frozenset(f"{kind}:{i}" for kind, flags in kinds.items() for i, skip in enumerate(flags) if skip)


def _profile(layers: int, saved: Saved, other: float = 0.02) -> CostProfile:
    """Some sub-layers save what they are said to, others as much as each other."""
    costs = [tuple(saved.get(f"{kind}:{i}", other) for i in range(layers)) for kind in ("attention", "mlp")]
    return CostProfile(100, 0.1, 0.0, costs[0], costs[1], 0.0, 0.0, (1.0,) * 7)


@dataclass
class Told(Landscape):
    """The log agreement that is lost is a function of what is skipped."""

    loss: Callable[[SkipMask], float] = field(default=lambda mask: 0.0)

    def agreement(self, mask: SkipMask) -> float:
        return math.exp(-self.loss(mask))


def _told(layers: int, loss: Callable[[SkipMask], float], saved: Saved | None = None) -> Told:
    return Told(0, layers=layers, profile=_profile(layers, saved or {}), loss=loss)


def _only(best: SkipMask) -> Told:
    """Every other mask that skips anything loses nearly all."""
    return _told(best.layers, lambda mask: 3.0 * (mask not in (best, SkipMask.none(best.layers))))


def _space(layers: int) -> SearchSpace:
    return SearchSpace(layers, protect_first=0, protect_last=0, skip_length=(1, 6))


def additive() -> tuple[Told, SkipMask]:
    """Beyond a loss of a tenth nothing is accepted; the cheapest one keeps three others out that save more together."""
    saved = {"attention:1": 0.3, "attention:3": 0.17, "mlp:5": 0.175, "attention:8": 0.18}
    losses = {"attention:1": 0.045, "attention:3": 0.035, "mlp:5": 0.035, "attention:8": 0.035}

    def loss(mask: SkipMask) -> float:
        lost = sum(losses.get(part, 0.09) for part in _parts(mask))
        return lost if lost < 0.107 else 9.0

    return _told(10, loss, saved), SkipMask.parse("attention:3,8;mlp:5", 10)


def interacting() -> tuple[Told, SkipMask]:
    """Five go together, each a gain; the cheapest and the best by itself go with nobody, and mislead who adds up.

    Four others lose the least, and save next to nothing.
    """
    alone = {"mlp:0": 0.001, "attention:0": 0.2}
    good = {f"attention:{i}": 0.02 for i in (4, 6, 8, 10, 11)}
    idle = {f"mlp:{i}": 0.015 for i in (2, 5, 7, 9)}

    def loss(mask: SkipMask) -> float:
        parts = _parts(mask)
        clash = len(parts) > 1 and bool(parts & alone.keys())
        return sum((alone | good | idle).get(part, 1.0) for part in parts) + 9.0 * clash

    saved = {"mlp:0": 0.01, "attention:0": 0.5} | dict.fromkeys(good, 0.1) | dict.fromkeys(idle, 0.001)
    return _told(12, loss, saved), SkipMask.of(12, {4, 6, 8, 10, 11}, set())


def _apart(one: SkipMask, other: SkipMask) -> int:
    return len(_parts(one) ^ _parts(other))


def flipped() -> tuple[Told, SkipMask]:
    """A run but for two sub-layers that are kept, far from each other; each alone is a loss that tells nothing."""
    best = SkipMask.of(14, {3, 4, 5, 6, 8, 9, 10}, {3, 4, 6, 7, 8, 9, 10})

    def loss(mask: SkipMask) -> float:
        return 3.0 if mask.skipped == 1 else 0.02 + 0.15 * _apart(mask, best)

    return _told(14, loss), best


def swapped() -> tuple[Told, SkipMask]:
    """A run but for one sub-layer in place of another; more of them or fewer do not go together."""
    best = SkipMask.of(14, {3, 4, 5, 6, 8, 9, 10, 12}, {3, 4, 5, 6, 7, 8, 9, 10})

    def loss(mask: SkipMask) -> float:
        if mask.skipped == 1:  # which is the dearest, and which the cheapest
            return {"attention:7": 3.0, "attention:12": 0.5}.get(mask.format(), 2.0)
        return 0.02 + 0.1 * _apart(mask, best) + 1.0 * (mask.skipped != best.skipped)

    return _told(14, loss), best


def contiguous() -> tuple[Told, SkipMask]:
    """One run, of which no part pays."""
    best = run(14, 4, 6)
    return _only(best), best


def published() -> tuple[Told, SkipMask]:
    """What somebody published for 40 layers, at a depth of 21, and nothing like it."""
    best = published_masks(21, range(21))[1]
    return _only(best), best


@pytest.mark.parametrize(
    ("landscape", "part"),
    [
        (additive, "_knapsacks"),
        (interacting, "_add_greedily"),
        (flipped, "MaskSearch.near"),
        (swapped, "MaskSearch.near"),
        (contiguous, "_ask_runs"),
        (published, "published_masks"),
    ],
)
def test_every_kind_finds_what_no_other_does(
    landscape: Callable[[], tuple[Told, SkipMask]], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, best = landscape()
    space = _space(oracle.layers)
    assert propose(oracle, space, ProposalSettings())[0].config.mask == best.format()
    monkeypatch.setattr(f"searches.predict.mask_search.{part}", lambda *_: [])
    assert propose(oracle, space, ProposalSettings())[0].config.mask != best.format()


@pytest.mark.parametrize("seed", range(4))
def test_a_knapsack_saves_what_no_other_choice_does(seed: int) -> None:
    """Against all choices of ten sub-layers, at every loss that is allowed; losses are whole steps."""
    source, budgets = random.Random(seed), (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
    names = [f"{kind}:{i}" for kind in ("attention", "mlp") for i in range(5)]
    steps, saved = {name: source.randint(1, 40) for name in names}, {name: source.uniform(0.01, 0.1) for name in names}
    oracle = _told(5, lambda mask: 0.005 * sum(steps[part] for part in _parts(mask)), saved)
    next(MaskSearch(oracle, _space(5), 1000, lambda: None).explore())
    asked = {_parts(mask) for mask in oracle.asked}
    choices = [frozenset(some) for count in range(11) for some in itertools.combinations(names, count)]
    for budget in budgets:
        within = [some for some in choices if sum(steps[name] for name in some) <= round(-math.log(1 - budget) / 0.005)]
        assert max(within, key=lambda some: sum(saved[name] for name in some)) in asked
    assert len(asked) <= 1 + len(names) + len(budgets)


def test_all_published_masks_are_asked_about_where_the_budget_holds_them() -> None:
    oracle, space = published()[0], _space(21)
    masks = published_masks(21, space.skippable)
    assert len(set(masks)) == 25
    singles, knapsacks = 1 + 2 * 21, 6
    propose(oracle, space, ProposalSettings(screened=singles + knapsacks + 25))
    assert set(masks) <= set(oracle.asked)


def test_masks_from_elsewhere_are_asked_about() -> None:
    """As those of CLaSp are; bridged masks are found otherwise."""
    odd = SkipMask.parse("attention:2,5,11;mlp:3,8", 14)
    told, narrowed = _only(odd), _only(odd)
    space = replace(_space(14), siblings=0)
    assert propose(told, space, ProposalSettings())[0].config.mask != odd.format()
    assert propose(told, space, ProposalSettings(), also=[odd])[0].config.mask == odd.format()
    both = propose_all(told, space, ProposalSettings(enqueued=1), also=[odd], narrowed=[narrowed])
    assert [config.mask for config in both if config.kind == "layer_skip"] == [odd.format()] * 2

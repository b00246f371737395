"""Proposals compared with all masks of a small model, and with the only good mask of a large one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from layerskip import DraftPlan, SpeculativeConfig
from layerskip.costs.cost_model import CostProfile
from layerskip.draft_plan import BITS, NAMES
from searches.predict.mask_search import MaskSearch, Prediction, SearchControl, drafting_with, expected_speedup, run
from searches.predict.proposals import ProposalSettings, propose, propose_plans
from searches.space.search_space import SearchSpace

Parts = frozenset[str]

LAYERS = 8
PROFILE = CostProfile(
    100, 0.002, 0.0001, (0.0004,) * LAYERS, (0.0012,) * LAYERS, 0.0, 0.0, tuple(0.015 * (1 + 0.02 * g) for g in range(7))
)
LONG_PROFILE = CostProfile(100, 0.2, 0.0, (0.01,) * 28, (0.02,) * 28, 0.0, 0.0, (1.0,) * 7)
LENGTHS = {"layer_skip": {"num_speculative_tokens": (1, 6)}}
SPACE = SearchSpace(LAYERS, protect_first=2, protect_last=1, ranges=LENGTHS)
LONG_SPACE = SearchSpace(28, ranges=LENGTHS)


@dataclass
class Landscape:
    """A predictor whose lost log agreement is a given function of the mask."""

    loss: Callable[[DraftPlan], float]
    layers: int = LAYERS
    profile: CostProfile = PROFILE
    screened: list[DraftPlan] = field(default_factory=list)
    prompts: frozenset[str] = frozenset("x")
    screened_together: int = 8
    predicted: tuple[str, ...] = ("layer_skip", "quantized")

    def agreement(self, mask: DraftPlan) -> float:
        return math.exp(-self.loss(mask))

    def agreements(self, masks: Sequence[DraftPlan]) -> list[float]:
        self.screened += masks
        return [self.agreement(mask) for mask in masks]

    def expected(self, mask: DraftPlan) -> float:
        return expected_speedup(self, mask, self.agreement(mask), (1, 6))[0]

    def predict(self, masks: Sequence[DraftPlan]) -> list[Prediction]:
        return [Prediction(drafting_with(mask, 2), self.expected(mask)) for mask in masks]

    def can_predict(self, config: SpeculativeConfig) -> bool:
        return config.method == "layer_skip" and config.stop.method == "length"

    def speedup(self, config: SpeculativeConfig) -> float:
        (found,) = self.predict([DraftPlan.parse(config.mask, LAYERS)])
        return found.speedup


def additive(seed: int) -> Landscape:
    """Return a landscape whose losses add up, except that adjacent sub-layers lose less together."""
    source = random.Random(seed)
    losses = {(sublayer, i): source.uniform(0.005, 0.2) for sublayer in ("attention", "mlp") for i in range(LAYERS)}

    def loss(mask: DraftPlan) -> float:
        together = sum(mask.attention[i] and mask.mlp[i] and mask.attention[i + 1] for i in range(LAYERS - 1))
        return sum(losses[method, i] for method, i in losses if getattr(mask, method)[i]) - 0.02 * together

    return Landscape(loss)


@pytest.mark.parametrize("seed", range(3))
def test_proposals_are_close_to_the_best_of_all_masks(seed: int) -> None:
    predictor = additive(seed)
    found = propose(predictor, SPACE, ProposalSettings(screened=150, scanned=8, enqueued=3))
    bits = [(False, True) if i in SPACE.skippable else (False,) for i in range(LAYERS)]
    every = [DraftPlan(a, m) for a in itertools.product(*bits) for m in itertools.product(*bits)]
    assert found[0].speedup == pytest.approx(max(map(predictor.expected, every)), rel=0.005)
    assert len({prediction.config for prediction in found}) == 3
    assert len(predictor.screened) == len(set(predictor.screened)) <= 150


def test_a_space_of_few_masks_is_searched_whole() -> None:
    predictor = _landscape(3, lambda mask: 0.1 * len(_parts(mask)))
    found = propose(predictor, SearchSpace(3, protect_first=1, protect_last=1, ranges=LENGTHS), ProposalSettings(enqueued=9))
    masks = ("", "attention:1", "mlp:1", "layers:1")
    assert {prediction.config.mask for prediction in found} <= set(masks)
    assert sorted(map(DraftPlan.format, predictor.screened)) == sorted(masks)


def _parts(mask: DraftPlan) -> Parts:
    """Return the skipped sub-layers, each formatted as the mask that skips only it."""
    kinds = {"attention": mask.attention, "mlp": mask.mlp}
    return frozenset(f"{kind}:{i}" for kind, flags in kinds.items() for i, skip in enumerate(flags) if skip)


def _apart(one: DraftPlan, other: DraftPlan) -> int:
    return len(_parts(one) ^ _parts(other))


def _landscape(layers: int, loss: Callable[[DraftPlan], float], saved: dict[str, float] | None = None) -> Landscape:
    """Return a landscape in which some sub-layers save the given seconds, and all others 0.02."""
    costs = [tuple((saved or {}).get(f"{kind}:{i}", 0.02) for i in range(layers)) for kind in ("attention", "mlp")]
    profile = CostProfile(100, 0.1, 0.0, costs[0], costs[1], 0.0, 0.0, (1.0,) * 7)
    return Landscape(loss, layers, profile)


def _whole(layers: int) -> SearchSpace:
    return SearchSpace(layers, protect_first=0, protect_last=0, ranges=LENGTHS)


def interacting() -> tuple[Landscape, DraftPlan]:
    """Solve by adding greedily only: five sub-layers combine, each with a gain.

    The cheapest one and the best single one combine with no other, which misleads sums. Four others lose least and save
    almost nothing.
    """
    alone = {"mlp:0": 0.001, "attention:0": 0.2}
    good = {f"attention:{i}": 0.02 for i in (4, 6, 8, 10, 11)}
    idle = {f"mlp:{i}": 0.015 for i in (2, 5, 7, 9)}

    def loss(mask: DraftPlan) -> float:
        parts = _parts(mask)
        clash = len(parts) > 1 and bool(parts & alone.keys())
        return sum((alone | good | idle).get(part, 1.0) for part in parts) + 9.0 * clash

    saved = {"mlp:0": 0.01, "attention:0": 0.5} | dict.fromkeys(good, 0.1) | dict.fromkeys(idle, 0.001)
    return _landscape(12, loss, saved), DraftPlan.of(12, {4, 6, 8, 10, 11}, set())


def swapped() -> tuple[Landscape, DraftPlan]:
    """Solve with swaps only: a run with one sub-layer in place of another; another number of sub-layers loses much."""
    best = DraftPlan.of(14, {3, 4, 5, 6, 8, 9, 10, 12}, {3, 4, 5, 6, 7, 8, 9, 10})

    def loss(mask: DraftPlan) -> float:
        if sum(mask.attention + mask.mlp) == 1:  # the dearest and the cheapest one
            return {"attention:7": 3.0, "attention:12": 0.5}.get(mask.format(), 2.0)
        return 0.02 + 0.1 * _apart(mask, best) + 1.0 * (sum(mask.attention + mask.mlp) != 16)

    return _landscape(14, loss), best


@pytest.mark.parametrize(
    ("landscape", "part"), [(interacting, "MaskSearch._add_greedily"), (swapped, "MaskSearch.neighbours")]
)
def test_every_kind_finds_a_mask_that_no_other_finds(
    landscape: Callable[[], tuple[Landscape, DraftPlan]], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor, best = landscape()
    space = _whole(predictor.layers)
    assert propose(predictor, space, ProposalSettings())[0].config.mask == best.format()
    monkeypatch.setattr(f"searches.predict.mask_search.{part}", lambda *_: [])
    assert propose(predictor, space, ProposalSettings())[0].config.mask != best.format()


@pytest.mark.parametrize("seed", range(2))
def test_knapsacks_are_optimal(seed: int) -> None:
    """Compared with all choices of ten sub-layers for every budget; losses are multiples of the step."""
    source, budgets = random.Random(seed), (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
    names = [f"{kind}:{i}" for kind in ("attention", "mlp") for i in range(5)]
    steps, saved = {name: source.randint(1, 40) for name in names}, {name: source.uniform(0.01, 0.1) for name in names}
    predictor = _landscape(5, lambda mask: 0.005 * sum(steps[part] for part in _parts(mask)), saved)
    MaskSearch(predictor, _whole(5), 1 + len(names) + len(budgets)).screen_structured()
    screened = {_parts(mask) for mask in predictor.screened}
    choices = [frozenset(some) for count in range(11) for some in itertools.combinations(names, count)]
    for budget in budgets:
        within = [some for some in choices if sum(steps[name] for name in some) <= round(-math.log(1 - budget) / 0.005)]
        assert max(within, key=lambda some: sum(saved[name] for name in some)) in screened


@pytest.mark.parametrize("seed", range(3))
def test_proposed_plans_are_close_to_the_best_of_all_plans(seed: int) -> None:
    source = random.Random(seed)
    places = [*itertools.product(("attention", "mlp"), range(3)), ("head", 0)]
    most = 0.01, 0.1, 0.3  # log agreement that 8 bits, 4 bits and a skip may lose
    losses = {place: sorted(source.uniform(0.0, end) for end in most) for place in places}

    def loss(plan: DraftPlan) -> float:
        names = {place: plan.treatment(*place) for place in places[:-1]} | {places[-1]: NAMES[plan.head_bits]}
        return sum(losses[place][("int8", "int4", "skip").index(name)] for place, name in names.items() if name != "keep")

    shares = {"int8": (0.7, 0.8, 0.6), "int4": (0.5, 0.7, 0.35)}
    profile = CostProfile(100, 0.2, 0.01, (0.1,) * 3, (0.15,) * 3, 0.0, 0.0, (1.0,) * 9, shares)
    space = SearchSpace(3, protect_first=1, protect_last=0, plans=True)
    predictor = Landscape(loss, 3, profile)
    found = propose_plans(predictor, space, ProposalSettings(scanned=12))
    assert [prediction.config.method for prediction in found] == ["quantized"] * 2
    every = []
    for head, *names in itertools.product(space.treatments[1:], *[space.treatments] * 6):
        plan = replace(DraftPlan.none(3), head_bits=BITS[head])
        for place, name in zip(places, names, strict=False):
            plan = plan.changed(*place, name)
        if plan.formats and not plan.attention[0] and not plan.mlp[0]:
            every.append(plan)
    best = max(map(predictor.expected, every))
    uniform = max(predictor.expected(DraftPlan.uniform(3, bits)) for bits in (4, 8))
    assert best * 0.99 <= found[0].speedup <= best
    assert found[0].speedup >= uniform
    assert not propose_plans(replace(predictor, profile=replace(profile, shares={})), space, ProposalSettings())

    def copies(plans: Sequence[DraftPlan]) -> dict[str, int]:
        return {name: BITS[name] * sum(plan.bits.count(BITS[name]) for plan in plans) for name in ("int8", "int4")}

    limited, predictor.screened = replace(space, copies_bytes=copies, memory=40), []  # all at 8 bits take 56
    found = propose_plans(predictor, limited, ProposalSettings(scanned=12))
    within = [plan for plan in every if sum(copies([plan]).values()) <= 40]
    assert set(predictor.screened) <= set(within)
    assert max(map(predictor.expected, within)) * 0.9 <= found[0].speedup
    assert not propose_plans(predictor, replace(limited, memory=20), ProposalSettings())


def test_a_long_run_is_found_if_short_ones_do_not_pay_off() -> None:
    """Only the run of layers 9 to 19 loses little, as measured on a model of 28 layers."""

    def loss(mask: DraftPlan) -> float:
        skipped = [i for i in range(28) if mask.attention[i] and mask.mlp[i]]
        odd = sum(mask.attention[i] != mask.mlp[i] for i in range(28))
        outside = sum(not 9 <= i <= 19 for i in skipped)
        missing = 0 if not skipped else sum(i not in skipped for i in range(9, 20))
        return 0.15 * bool(skipped) + 0.1 * odd + 0.3 * outside + 0.05 * missing

    predictor, small = (Landscape(loss, 28, LONG_PROFILE) for _ in range(2))
    some = [run(28, 9, 1), run(28, 9, 2), run(28, 12, 3), DraftPlan.none(28)]
    *short, plain = map(predictor.expected, some)
    assert max(short) < plain
    assert propose(predictor, LONG_SPACE, ProposalSettings())[0].config.mask == "layers:9-19"
    skippable = LONG_SPACE.skippable
    every = {run(28, a, b - a) for a in skippable for b in range(a + 1, skippable[-1] + 2)}
    assert every <= set(predictor.screened) and len(predictor.screened) <= 200 + len(every)
    propose(small, LONG_SPACE, ProposalSettings(screened=30))
    assert len(small.screened) == len(set(small.screened)) == 30


def test_the_best_screened_mask_is_reported_at_once() -> None:
    predictor, calls = additive(0), list[tuple[int, str]]()
    on_best = lambda config: calls.append((len(predictor.screened), config.mask))  # noqa: E731
    found = propose(predictor, SPACE, ProposalSettings(screened=150, scanned=8, enqueued=3), SearchControl(on_best=on_best))
    assert calls[0] == (1, "")  # the empty mask is screened first, alone
    speedups = [predictor.expected(DraftPlan.parse(mask, LAYERS)) for _, mask in calls]
    assert speedups == sorted(speedups)
    assert calls[-1][1] == found[0].config.mask


def test_expected_speedup_matches_the_paper() -> None:
    """arXiv 2211.17192, theorem 3.8, verification cost constant: (1 - a^(g+1)) / ((1 - a) (g c + 1)), for the best g."""
    profile = CostProfile(1, 0.1, 0.0, (0.1, 0.1), (0.1, 0.1), 0.0, 0.0, (0.5,) * 6)
    predictor, mask = Landscape(lambda _: 0.0, 2, profile), DraftPlan.parse("layers:1", 2)
    alpha, cost = 0.8, 0.3 / 0.5
    expected = max((1 - alpha ** (g + 1)) / ((1 - alpha) * (g * cost + 1)) for g in range(1, 5))
    assert expected_speedup(predictor, mask, alpha, (1, 4))[0] == pytest.approx(expected)
    assert expected_speedup(predictor, mask, 0.0, (3, 4))[1] == 3
    assert profile.speedup_bound(mask) == pytest.approx(max((g + 1) / (g * cost + 1) for g in range(1, 6)))

"""Search for promising draft plans among very many; each candidate is screened by its first drafted tokens.

Random masks skip half of all sub-layers and never recover, so structured candidates come first: every sub-layer skipped
alone, a knapsack over their losses (after KnapSpec, arXiv 2602.20217), contiguous runs of layers, and the cheapest losses
added one by one. Then come flips and swaps around the best mask.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from layerskip import DraftPlan, SpeculativeConfig, StopRule
from layerskip.config import NEVER
from layerskip.costs.cost_model import CostProfile
from layerskip.draft_plan import BITS, KEEP, SKIP
from searches.space.search_space import SearchSpace

_CLOSE = 0.99  # speedups closer than this cannot be distinguished by a cost profile
_PATIENCE = 2  # steps without a gain after which the greedy search ends
_SHORTLIST = 4  # candidates of each greedy step
_BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)  # agreement that a knapsack may lose
_LOSS_STEP = 0.005  # resolution of log agreement in a knapsack
_PRICES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # of a step of plain decoding, in log agreement
SCREENED_TOGETHER = 8  # masks, by one process


@dataclass(frozen=True)
class Prediction:
    """The predicted speedup of a configuration over plain decoding; of a mask, with its best draft length and stop rule."""

    config: SpeculativeConfig
    speedup: float


class SpeedupPredictor(Protocol):
    """Predictor of speedups before anything is decoded, above all those of layer skipping."""

    layers: int  # of a mask
    prompts: frozenset[str]  # the ids of those that speedups are predicted for
    profile: CostProfile
    predicted: Collection[str]  # the methods whose plans are predicted
    screened_together: int  # the number of masks to ask :meth:`agreements` for at once

    def agreements(self, masks: Sequence[DraftPlan]) -> list[float]:
        """Return how often the first drafted token of each mask is the target's, on few positions: the cheapest estimate."""

    def predict(self, masks: Sequence[DraftPlan]) -> list[Prediction]:
        """Predict each mask's best speedup, from all positions."""

    def can_predict(self, config: SpeculativeConfig) -> bool:
        """Return whether the speedup of a configuration, with its draft length and stop rule, can be predicted."""

    def speedup(self, config: SpeculativeConfig) -> float:
        """Predict the speedup of a configuration for which :meth:`can_predict` is true."""


@dataclass(frozen=True)
class SearchControl:
    """What a search for masks tells while it runs, and ends by."""

    is_over: Callable[[], bool] = lambda: False  # whether time has run out; nothing more is screened then
    to_beat: float = 0.0  # the measured speedup below which masks are of no use; 0 if nothing was measured
    report: Callable[[str], object] = lambda _: None  # takes a sentence on what was left out
    on_mask: Callable[[], object] = lambda: None  # called after every screened mask
    on_best: Callable[[SpeculativeConfig], object] = lambda _: None  # called with each expected to be the best so far


class Screening(abc.ABC):
    """Screening of plans of one method, each once, within a budget."""

    method: ClassVar[str]

    def __init__(
        self, predictor: SpeedupPredictor, space: SearchSpace, budget: int, control: SearchControl = SearchControl()
    ) -> None:
        self.predictor, self.layers, self.skippable = predictor, predictor.layers, space.skippable
        self.scores: dict[DraftPlan, float] = {}  # the expected speedup of every screened plan
        self.agreements: dict[DraftPlan, float] = {}  # how often its first drafted token is the target's
        self.treatments, self._over_memory = space.treatments, space.over_memory
        self._lengths, self.left, self._control = space.values(self.method, "num_speculative_tokens"), budget, control

    def screen(self, masks: Iterable[DraftPlan]) -> list[float]:
        """Return the masks' expected speedups; 0 for those that the budget or the memory does not cover."""
        masks = list(masks)
        unknown = (mask for mask in dict.fromkeys(masks) if mask not in self.scores and not self._over_memory([mask]))
        new = list(itertools.islice(unknown, self.left))
        self.left -= len(new)
        size = self.predictor.screened_together
        for first in range(0, len(new), size):
            if self.scores and self._control.is_over():
                self.left = 0
                break
            batch = new[first : first + size]
            for mask, agreement in zip(batch, self.predictor.agreements(batch), strict=True):
                self.agreements[mask] = agreement
                self.scores[mask], length = expected_speedup(self.predictor, mask, agreement, self._lengths)
                self._control.on_mask()
                if mask == self.best:
                    self._control.on_best(drafting_with(mask, length))
        return [self.scores.get(mask, 0.0) for mask in masks]

    @property
    def best(self) -> DraftPlan:
        return max(self.scores, key=self.scores.__getitem__)

    def best_first(self, masks: Iterable[DraftPlan]) -> list[DraftPlan]:
        """Return those of some masks that were screened, by descending expected speedup."""
        return sorted((mask for mask in masks if mask in self.scores), key=lambda mask: -self.scores[mask])

    @abc.abstractmethod
    def neighbours(self, mask: DraftPlan) -> list[DraftPlan]:
        """Return plans that differ little from a plan."""

    def _log_loss(self, plan: DraftPlan) -> float:
        return -math.log(max(self.agreements.get(plan, 0.0), 1e-6))


class MaskSearch(Screening):
    """Search for masks."""

    method = "layer_skip"

    def __init__(
        self, predictor: SpeedupPredictor, space: SearchSpace, budget: int, control: SearchControl = SearchControl()
    ) -> None:
        super().__init__(predictor, space, budget, control)
        self.sublayers = [(kind, layer) for layer in space.skippable for kind in ("attention", "mlp")]
        self.singles = {part: flip(DraftPlan.none(self.layers), *part) for part in self.sublayers}

    def screen_structured(self) -> None:
        """Screen no skip, single sub-layers, knapsacks and contiguous runs of whole layers.

        A long run may pay off when none of its parts does, so no run is left out because shorter ones score low.
        """
        self.screen([DraftPlan.none(self.layers)])  # alone, since a small budget may allow no more
        self.screen(self.singles.values())
        self.screen(self._knapsacks())
        runs = [(first, last) for first in self.skippable for last in self.skippable if first <= last]
        # Where the budget does not cover all, those between spaced ends come first, and half of it is left for other masks.
        runs.sort(key=lambda ends: -math.gcd(ends[0], ends[1] + 1, 8))
        most = max(self.left - 2 * len(self.sublayers), self.left // 2)
        self.screen(run(self.layers, first, last + 1 - first) for first, last in runs[:most])

    def improve(self) -> None:
        """Add sub-layers greedily, then flip and swap those of the best mask until none improves or the budget ends."""
        self._add_greedily()
        before = None
        while self.left and self.best != before:
            before = self.best
            self.screen(self.neighbours(before))

    def neighbours(self, mask: DraftPlan) -> list[DraftPlan]:
        """Return the mask with single sub-layers flipped, and pairs of the most promising ones, of which some are swaps."""
        skipped = [part for part in self.sublayers if getattr(mask, part[0])[part[1]]]
        kept = [part for part in self.sublayers if part not in skipped]
        cheapest = sorted(kept, key=self._loss_per_second)[:_SHORTLIST]
        dearest = sorted(skipped, key=lambda part: -self._loss_per_second(part))[:_SHORTLIST]
        pairs = itertools.combinations([*dearest, *cheapest], 2)
        return [flip(mask, *part) for part in self.sublayers] + [flip(flip(mask, *one), *other) for one, other in pairs]

    def _knapsacks(self) -> list[DraftPlan]:
        """Return, for several budgets of lost agreement, the sub-layers that save most time within it if losses add up.

        KnapSpec (arXiv 2602.20217) also weighs sub-layers by their time at a context, but runs them: for every sum of saved
        time it keeps the hidden states most similar to the whole model's. Here nothing more is run. The weight of a
        sub-layer is its loss when it is skipped alone, and the value is its time.
        """
        capacities = [round(-math.log(1 - budget) / _LOSS_STEP) for budget in _BUDGETS]
        best = [(0.0, DraftPlan.none(self.layers))] * (max(capacities) + 1)  # saved seconds and mask, by capacity
        for part in self.sublayers:
            weight, saved = max(0, round(self._loss(part) / _LOSS_STEP)), self._saved_seconds(part)
            for capacity in range(len(best) - 1, weight - 1, -1):  # downwards, so that no part is taken twice
                seconds, mask = best[capacity - weight]
                if seconds + saved > best[capacity][0]:
                    best[capacity] = seconds + saved, flip(mask, *part)
        return [best[capacity][1] for capacity in capacities]

    def _add_greedily(self) -> None:
        """Skip one more sub-layer at a time: the best of the few remaining ones with the least loss per second."""
        order = sorted(self.sublayers, key=self._loss_per_second)
        mask = DraftPlan.none(self.layers)
        best, misses = 0.0, 0
        while order and misses < _PATIENCE and self.left:
            candidates = order[:_SHORTLIST]
            scores = self.screen([flip(mask, *part) for part in candidates])
            score, chosen = max(zip(scores, candidates, strict=True))
            misses = 0 if score > best else misses + 1
            best = max(best, score)
            mask = flip(mask, *chosen)
            order.remove(chosen)

    def _saved_seconds(self, part: tuple[str, int]) -> float:
        kind, layer = part
        return float(getattr(self.predictor.profile, f"{kind}_seconds")[layer])

    def _loss(self, part: tuple[str, int]) -> float:
        """Return the log agreement that one skipped sub-layer loses. Losses add up if sub-layers do not interact."""
        return self._log_loss(self.singles[part])

    def _loss_per_second(self, part: tuple[str, int]) -> float:
        saved = self._saved_seconds(part)
        return self._loss(part) / saved if saved > 0 else math.inf


class PlanSearch(Screening):
    """Search for plans that read fewer bits, from the best format of all sub-layers and of the output layer on."""

    method = "quantized"

    def screen_structured(self) -> None:
        """Screen every format of all sub-layers, with every format of the output layer."""
        formats = self.treatments[1:]
        uniform = [DraftPlan.uniform(self.layers, BITS[name]) for name in formats if name != KEEP]
        self.screen(replace(plan, head_bits=BITS[name]) for plan in uniform for name in formats)

    def improve(self) -> None:
        """Change every sub-layer of the best plan alone, then all of those together whose loss pays off in seconds.

        A knapsack would ask for the least loss at a number of saved seconds. Here a price of a second, in log agreement,
        takes the place of that number, so each sub-layer chooses by itself, and several prices give several plans.
        """
        base = self.best
        options = {part: [base.changed(*part, name) for name in self._choices(part[1])] for part in self._parts()}
        options = {part: [plan for plan in plans if not self._over_memory([plan])] for part, plans in options.items()}
        self.screen(plan for plans in options.values() for plan in plans)
        if not all(plan in self.scores for plans in options.values() for plan in plans):
            return
        step = self.predictor.profile.verify_seconds[0]
        self.screen(self._at_price(base, options, price / step) for price in _PRICES)

    def neighbours(self, mask: DraftPlan) -> list[DraftPlan]:
        """Return the plan with another format of the output layer, or another treatment of one sub-layer."""
        heads = [replace(mask, head_bits=BITS[name]) for name in self.treatments[1:]]
        singles = [mask.changed(*part, name) for part in self._parts() for name in self._choices(part[1])]
        return [plan for plan in (*heads, *singles) if plan != mask]

    def _parts(self) -> list[tuple[str, int]]:
        return [(kind, layer) for layer in range(self.layers) for kind in ("attention", "mlp")]

    def _choices(self, layer: int) -> tuple[str, ...]:
        """Return the treatments of a layer's sub-layers. With 8 bits, none needs more."""
        found = [name for name in self.treatments if name != KEEP or "int8" not in self.treatments]
        return tuple(name for name in found if name != SKIP or layer in self.skippable)

    def _at_price(self, base: DraftPlan, options: Mapping[tuple[str, int], Sequence[DraftPlan]], price: float) -> DraftPlan:
        """Return the plan that gives every sub-layer the treatment with the least loss, and seconds at a price."""
        profile, found = self.predictor.profile, base
        for (kind, layer), plans in options.items():
            cost = {plan: self._log_loss(plan) + price * profile.draft_seconds(plan) for plan in plans}
            changed = found.changed(kind, layer, min(cost, key=cost.__getitem__).treatment(kind, layer))
            found = found if self._over_memory([changed]) else changed
        return found


def drafting_with(plan: DraftPlan, num_speculative_tokens: int, stop: StopRule = NEVER) -> SpeculativeConfig:
    if plan.formats:
        values = {"weights": plan.format(), "num_speculative_tokens": num_speculative_tokens, "stop": stop}
        return SpeculativeConfig.of("quantized", values)
    return SpeculativeConfig("layer_skip", num_speculative_tokens, plan.format(), stop)


def expected_speedup(
    predictor: SpeedupPredictor, mask: DraftPlan, agreement: float, lengths: tuple[int, int]
) -> tuple[float, int]:
    """Return the best expected speedup over draft lengths, and the shortest draft length that comes close to it.

    Every drafted token is assumed to be accepted with the probability ``agreement``. Source: Fast Inference from
    Transformers via Speculative Decoding (arXiv 2211.17192), theorem 3.8, with a measured cost of verification.
    """
    profile, (shortest, longest) = predictor.profile, lengths
    speedups = {}
    for length in range(shortest, min(longest, profile.longest) + 1):
        tokens = sum(agreement**accepted for accepted in range(length + 1))
        speedups[length] = tokens * profile.verify_seconds[0] / profile.round_cost(mask, length)
    best = max(speedups.values(), default=0.0)
    return best, min((length for length, speedup in speedups.items() if speedup >= _CLOSE * best), default=shortest)


def flip(mask: DraftPlan, kind: str, layer: int) -> DraftPlan:
    """Return the mask with one sub-layer skipped instead of kept, or kept instead of skipped."""
    return mask.changed(kind, layer, KEEP if getattr(mask, kind)[layer] else SKIP)


def run(layers: int, first: int, length: int) -> DraftPlan:
    flags = tuple(first <= layer < first + length for layer in range(layers))
    return DraftPlan(flags, flags)

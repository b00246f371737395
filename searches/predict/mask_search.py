"""Which masks are worth asking about? Few of very many, found by asking about others.

Structure first, as random masks skip half of all sub-layers and never recover: every sub-layer left out alone, contiguous
runs, the cheapest losses added up one by one, a knapsack over them (after KnapSpec, arXiv 2602.20217), published masks
stretched to the model's depth; then flips and swaps around the best.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import resources

import numpy as np

from layerskip import SkipMask, SpeculativeConfig
from searches.predict.oracle import Oracle
from searches.space.search_space import SearchSpace

_AT_ONCE = 8  # masks asked about together
_CLOSE = 0.99  # speedups that no profile tells apart
_PATIENCE = 2  # steps without a gain before a greedy search ends
_RUNS = 3  # contiguous runs whose ends are moved
_SHORTLIST = 4  # candidates of each greedy step
_BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)  # agreement that a knapsack may lose

Runs = dict[tuple[int, int], float]
"""What contiguous runs of whole layers are worth, by their first layer and the one behind their last."""


class MaskSearch:
    """Asks about masks, each once, until so many are asked; keeps what each is worth."""

    def __init__(
        self,
        oracle: Oracle,
        space: SearchSpace,
        most: int,
        on_mask: Callable[[], None],
        on_best: Callable[[SpeculativeConfig], None] = lambda _: None,
    ) -> None:
        self.oracle, self.layers, self.skippable = oracle, oracle.layers, space.skippable
        self.scores: dict[SkipMask, float] = {}
        self.agreements: dict[SkipMask, float] = {}
        self._lengths, self._left = (space.skip_length[0], space.skip_length[1]), most
        self._on_mask, self.on_best = on_mask, on_best

    def ask(self, masks: Iterable[SkipMask]) -> list[float]:
        """What the masks are worth; those that there is no budget left for are worth nothing."""
        masks = list(masks)
        new = [mask for mask in dict.fromkeys(masks) if mask not in self.scores][: self._left]
        self._left -= len(new)
        for first in range(0, len(new), _AT_ONCE):
            some = new[first : first + _AT_ONCE]
            for mask, agreement in zip(some, self.oracle.agreements(some), strict=True):
                self.agreements[mask] = agreement
                self.scores[mask], length = expected_speedup(self.oracle, mask, agreement, self._lengths)
                self._on_mask()
                if mask == self.best:
                    self.on_best(SpeculativeConfig("layer_skip", length, mask=mask.format()))
        return [self.scores.get(mask, 0.0) for mask in masks]

    @property
    def left(self) -> int:
        """How many masks may still be asked about."""
        return self._left

    @property
    def exhausted(self) -> bool:
        """Whether the budget is spent."""
        return self._left <= 0

    @property
    def best(self) -> SkipMask:
        """The mask that is worth most."""
        return max(self.scores, key=lambda mask: self.scores[mask])

    def explore(self, also: Sequence[SkipMask] = ()) -> Iterator[SkipMask]:
        """Ask about all that may pay, and about some masks beside; after each part but the last, the best so far."""
        self.ask([SkipMask.none(self.layers)])  # alone, as it may be all that there is to find
        self.ask(self.single(*part) for part in self.sublayers())
        self.ask(_knapsacks(self))
        yield self.best
        self.ask(also)
        self.ask(published_masks(self.layers, self.skippable))
        _ask_runs(self)
        yield self.best
        _add_greedily(self)
        yield self.best
        _change_best(self)

    def foremost(self, most: int) -> list[SkipMask]:
        """The most promising masks, best first."""
        return sorted(self.scores, key=lambda mask: -self.scores[mask])[:most]

    def single(self, kind: str, layer: int) -> SkipMask:
        """The mask that skips one sub-layer."""
        return flip(SkipMask.none(self.layers), kind, layer)

    def sublayers(self) -> list[tuple[str, int]]:
        """All that may be skipped."""
        return [(kind, layer) for layer in self.skippable for kind in ("attention", "mlp")]

    def near(self, mask: SkipMask) -> list[SkipMask]:
        """Flips of single sub-layers, and of pairs among those that promise most: a skipped and a kept one are a swap."""
        skipped = [part for part in self.sublayers() if getattr(mask, part[0])[part[1]]]
        kept = [part for part in self.sublayers() if part not in skipped]
        cheapest = sorted(kept, key=lambda part: self.price(*part))[:_SHORTLIST]
        dearest = sorted(skipped, key=lambda part: -self.price(*part))[:_SHORTLIST]
        pairs = itertools.combinations([*dearest, *cheapest], 2)
        return [flip(mask, *part) for part in self.sublayers()] + [flip(flip(mask, *one), *other) for one, other in pairs]

    def price(self, kind: str, layer: int) -> float:
        """Agreement lost per second saved when one sub-layer is left out."""
        saved = self.oracle.profile.saved_seconds(kind)[layer]
        return self.loss(kind, layer) / saved if saved > 0 else math.inf

    def loss(self, kind: str, layer: int) -> float:
        """Log agreement lost when one sub-layer is left out; they add up where sub-layers do not interact."""
        agreement = self.agreements.get(self.single(kind, layer), 0.0)
        return -math.log(max(agreement, 1e-6))


def expected_speedup(oracle: Oracle, mask: SkipMask, agreement: float, lengths: tuple[int, int]) -> tuple[float, int]:
    """The best speedup over draft lengths, and the shortest that is close to it, if every drafted token were accepted with
    the same chance.

    Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192), theorem 3.8, with a measured cost of
    verification.
    """
    profile, aids = oracle.profile, oracle.aids(mask)
    shortest, longest = lengths
    found = {}
    for length in range(shortest, min(longest, profile.longest) + 1):
        tokens = sum(agreement**accepted for accepted in range(length + 1))
        found[length] = tokens * profile.verify_seconds[0] / profile.round(mask, length, aids)
    best = max(found.values(), default=0.0)
    return best, min((length for length, speedup in found.items() if speedup >= _CLOSE * best), default=shortest)


def published_masks(layers: int, skippable: Sequence[int]) -> list[SkipMask]:
    """What published systems skip, stretched or shrunk to a depth; protected layers are kept."""
    text = resources.files("searches").joinpath("data/published_masks.json").read_text(encoding="utf-8")
    found = [SkipMask.parse(row["mask"], row["layers"]).rescale(layers) for row in json.loads(text)["masks"]]
    return [
        SkipMask(
            tuple(skip and i in skippable for i, skip in enumerate(mask.attention)),
            tuple(skip and i in skippable for i, skip in enumerate(mask.mlp)),
        )
        for mask in found
    ]


def flip(mask: SkipMask, kind: str, layer: int) -> SkipMask:
    """The mask with one sub-layer skipped instead of kept, or kept instead of skipped."""
    flags = list(getattr(mask, kind))
    flags[layer] = not flags[layer]
    return replace(mask, **{kind: tuple(flags)})


def run(layers: int, first: int, length: int) -> SkipMask:
    """The mask that skips ``length`` whole layers from ``first`` on."""
    flags = tuple(first <= layer < first + length for layer in range(layers))
    return SkipMask(flags, flags)


def _ask_runs(search: MaskSearch) -> None:
    """Contiguous runs of whole layers: all that there are, where the budget holds them and two masks a sub-layer beside.

    Where it does not, every other start with ever doubled lengths, then the best with their ends moved. A long run may pay
    where none of its parts does, so none is left out for what shorter ones are worth. Far apart starts come first, so that a
    budget which does not reach for all has looked everywhere.
    """
    end = search.skippable[-1] + 1
    found: Runs = {}
    every = [(first, last) for first in search.skippable for last in range(first + 1, end + 1)]
    if len(every) <= search.left - 2 * len(search.sublayers()):
        ask_runs(search, found, every)
        return
    enough = search.left // 2  # for what comes behind
    for offset in (0, 4, 2, 6):
        for first in search.skippable[offset::8]:
            doubled = ((first, min(end, first + 2**power)) for power in range(1, (end - first).bit_length() + 1))
            ask_runs(search, found, doubled, enough)
    move_ends(search, found, search.left // 2)


def ask_runs(search: MaskSearch, found: Runs, runs: Iterable[tuple[int, int]], enough: int = 0) -> None:
    """Ask about contiguous runs of whole layers.

    Args:
        search: asks.
        found: what runs are worth, by where they begin and, exclusively, end; those that are asked about are added.
        runs: to ask about; those that reach into protected layers are left out.
        enough: so much of the budget stays unspent.
    """
    begin, end = search.skippable[0], search.skippable[-1] + 1
    new = [(a, b) for a, b in dict.fromkeys(runs) if begin <= a < b <= end and (a, b) not in found]
    new = new[: max(0, search.left - enough)]
    found.update(zip(new, search.ask(run(search.layers, a, b - a) for a, b in new), strict=True))


def move_ends(search: MaskSearch, found: Runs, enough: int = 0) -> None:
    """Move the ends of the best runs by one, again and again, until that makes none better; arguments as of ``ask_runs``."""
    for _, (first, last) in sorted(((score, ends) for ends, score in found.items()), reverse=True)[:_RUNS]:
        best = None
        while (first, last) != best:
            best = first, last
            near = [(first + i, last + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
            ask_runs(search, found, near, enough)
            first, last = max((ends for ends in near if ends in found), key=lambda ends: found[ends])


def _knapsacks(search: MaskSearch) -> list[SkipMask]:
    """For several budgets of lost agreement: the sub-layers that save most time within it, if losses added up.

    KnapSpec (arXiv 2602.20217) weighs sub-layers by their time at a context, too, but runs them: for every sum of saved
    time it keeps the hidden states that are most like the whole model's. Here nothing more is run: the weight is what each
    loses when it is left out alone, the value its time.
    """
    items = [(kind, layer, search.loss(kind, layer)) for kind, layer in search.sublayers()]
    step = 0.005
    weights = [max(0, round(loss / step)) for _, _, loss in items]
    capacity = round(-math.log(1 - max(_BUDGETS)) / step)
    values = [search.oracle.profile.saved_seconds(kind)[layer] for kind, layer, _ in items]
    best = np.zeros(capacity + 1)
    taken = np.zeros((len(items), capacity + 1), dtype=bool)
    for number, (weight, value) in enumerate(zip(weights, values, strict=True)):
        if weight > capacity:
            continue
        with_it = np.concatenate((np.full(weight, -np.inf), best[: capacity + 1 - weight] + value))
        taken[number] = with_it > best
        best = np.maximum(best, with_it)
    masks = []
    for budget in _BUDGETS:
        left, mask = round(-math.log(1 - budget) / step), SkipMask.none(search.layers)
        for number in reversed(range(len(items))):
            if taken[number, left]:
                kind, layer, _ = items[number]
                mask, left = flip(mask, kind, layer), left - weights[number]
        masks.append(mask)
    return masks


def _add_greedily(search: MaskSearch) -> None:
    """From nothing skipped: again and again the best of the few cheapest sub-layers left."""
    order = sorted(search.sublayers(), key=lambda part: search.price(*part))
    mask = SkipMask.none(search.layers)
    best, misses = 0.0, 0
    while order and misses < _PATIENCE and not search.exhausted:
        candidates = order[:_SHORTLIST]
        scores = search.ask([flip(mask, *part) for part in candidates])
        score, chosen = max(zip(scores, candidates, strict=True))
        misses = 0 if score > best else misses + 1
        best = max(best, score)
        mask = flip(mask, *chosen)
        order.remove(chosen)


def _change_best(search: MaskSearch) -> None:
    """Ask about what is near the best, until nothing near it is better."""
    while not search.exhausted:
        before = search.best
        search.ask(search.near(before))
        if search.best == before:
            return

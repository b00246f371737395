"""Which masks are worth decoding with? Found by foretelling many, for the price of a few passes each.

Structure first, as random masks skip half of all sub-layers and never recover: every sub-layer left out alone, contiguous
runs, the cheapest losses added up one by one, a knapsack over them (as KnapSpec chooses sub-layers by what they cost and
save), the layers that a dynamic programme over hidden states leaves out (CLaSp), published masks stretched to the model's
depth; then flips and swaps around the best. Every mask is first asked how often its first drafted token is the target's; the
most promising are scanned whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources

import numpy as np

from layerskip import SkipMask, SpeculativeConfig

from .application import check_whole
from .oracle import Oracle, Prediction
from .scan_oracle import ScanOracle
from .space import SearchSpace

_AT_ONCE = 8  # masks asked about together
_CLOSE = 0.99  # speedups that no profile tells apart
_SLACK = 0.03  # a run may look this much worse than the best so far and still grow
_PATIENCE = 2  # steps without a gain before a greedy search or a run ends
_EARLY = 2  # first layers of runs that are bridged
_SHORTLIST = 4  # candidates of each greedy step
_BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)  # agreement that a knapsack may lose


@dataclass(frozen=True)
class ProposalSettings:
    """How much is foretold before anything is decoded.

    Args:
        screened: the most masks asked about their first drafted token; None takes four for each sub-layer that may be
            skipped, and 200 at least.
        scanned: the most of them that are scanned whole.
        enqueued: the best of those become trials.
        lookups: so many prompt lookups, foretold to be the fastest, do too.
    """

    screened: int | None = None
    scanned: int = 12
    enqueued: int = 6
    lookups: int = 3

    def __post_init__(self) -> None:
        for name in ("screened", "scanned", "enqueued", "lookups"):
            value = getattr(self, name)
            if value is not None or name != "screened":
                check_whole(f"scan.proposals.{name}", value)

    def asked(self, space: SearchSpace) -> int:
        """The most masks asked about, in a space."""
        return self.screened if self.screened is not None else max(200, 8 * len(space.skippable))


def propose(
    oracle: Oracle,
    space: SearchSpace,
    settings: ProposalSettings,
    on_mask: Callable[[], None] = lambda: None,
    also: Sequence[SkipMask] = (),
    on_best: Callable[[SpeculativeConfig], None] = lambda _: None,
) -> list[Prediction]:
    """The masks that are foretold to be fastest, best first.

    Args:
        oracle: foretells.
        space: which layers may be skipped, and how far drafts may go.
        settings: how much to foretell.
        on_mask: called for every mask that is asked about.
        also: further masks to ask about.
        on_best: called with what the first drafted tokens make look fastest so far, whenever that changes.
    """
    search = _Search(oracle, space, settings.asked(space), on_mask, on_best)
    search.ask(_nothing_and_singles(search))
    search.ask(_knapsacks(search))
    search.ask(also)
    search.ask(published_masks(oracle.layers, space.skippable))
    _grow_runs(search, search.left // 2)
    _add_greedily(search)
    _change_best(search)
    return search.foremost(settings)


def propose_bridged(
    oracle: ScanOracle, space: SearchSpace, settings: ProposalSettings, on_mask: Callable[[], None] = lambda: None
) -> list[Prediction]:
    """The contiguous runs that are foretold to be fastest with what stands in for them, best first.

    One long early run with one bridge is worth more than scattered skips, whatever these are worth when they are empty; so
    runs from the first layers that may be skipped are asked about, of every other length.
    """
    search = _Search(oracle, space, settings.asked(space), on_mask, lambda _: None)
    end = space.skippable[-1]
    for first in space.skippable[:_EARLY]:
        search.ask(run(search.layers, first, length) for length in range(2, end - first + 2, 2))
    return search.foremost(settings)


def propose_lookups(oracle: Oracle, space: SearchSpace, most: int) -> list[Prediction]:
    """The prompt lookups that are foretold to be fastest, best first; the text alone decides what they draft."""
    configs = [config for config in space.lookups() if oracle.foretells(config)]
    found = [Prediction(config, oracle.speedup(config), 0.0) for config in configs]
    return sorted(found, key=lambda prediction: -prediction.speedup)[:most]


def propose_all(
    oracle: Oracle,
    space: SearchSpace,
    settings: ProposalSettings,
    on_mask: Callable[[], None] = lambda: None,
    also: Sequence[SkipMask] = (),
    bridged: Sequence[ScanOracle] = (),
) -> list[SpeculativeConfig]:
    """What a study tries first: lookups, as they are many times faster where the text repeats itself, then masks.

    Arguments are those of :func:`propose`, and oracles of masks that are bridged or draft from few tokens.
    """
    made_up = [prediction for other in bridged for prediction in propose_bridged(other, space, settings, on_mask)]
    made_up = sorted(made_up, key=lambda prediction: -prediction.speedup)[: settings.enqueued]
    found = propose(oracle, space, settings, on_mask, also)
    configs = [prediction.config for prediction in (*propose_lookups(oracle, space, settings.lookups), *found)]
    if found and space.siblings and not oracle.foretells(branching := replace(found[0].config, siblings=space.siblings)):
        configs.insert(len(configs) - len(found) + 1, branching)
    return configs + [prediction.config for prediction in made_up]


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


class _Search:
    """Asks about masks, each once, until so many are asked; keeps what each is worth."""

    def __init__(
        self,
        oracle: Oracle,
        space: SearchSpace,
        most: int,
        on_mask: Callable[[], None],
        on_best: Callable[[SpeculativeConfig], None],
    ) -> None:
        self.oracle, self.layers, self.skippable = oracle, oracle.layers, space.skippable
        self.scores: dict[SkipMask, float] = {}
        self.agreements: dict[SkipMask, float] = {}
        self._lengths, self._left = (space.skip_length[0], space.skip_length[1]), most
        self._on_mask, self._on_best = on_mask, on_best

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
                    self._on_best(SpeculativeConfig("layer_skip", length, mask=mask.format()))
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

    def foremost(self, settings: ProposalSettings) -> list[Prediction]:
        """What is foretold of the most promising masks, best first."""
        best = sorted(self.scores, key=lambda mask: -self.scores[mask])[: settings.scanned]
        return sorted(self.oracle.predict(best), key=lambda found: -found.speedup)[: settings.enqueued]

    def single(self, kind: str, layer: int) -> SkipMask:
        """The mask that skips one sub-layer."""
        return flip(SkipMask.none(self.layers), kind, layer)

    def sublayers(self) -> list[tuple[str, int]]:
        """All that may be skipped."""
        return [(kind, layer) for layer in self.skippable for kind in ("attention", "mlp")]

    def price(self, kind: str, layer: int) -> float:
        """Agreement lost per second saved when one sub-layer is left out."""
        saved = self.oracle.profile.saved_seconds(kind)[layer]
        return self.loss(kind, layer) / saved if saved > 0 else math.inf

    def loss(self, kind: str, layer: int) -> float:
        """Log agreement lost when one sub-layer is left out; they add up where sub-layers do not interact."""
        agreement = self.agreements.get(self.single(kind, layer), 0.0)
        return -math.log(max(agreement, 1e-6))


def flip(mask: SkipMask, kind: str, layer: int) -> SkipMask:
    """The mask with one sub-layer skipped instead of kept, or kept instead of skipped."""
    flags = list(getattr(mask, kind))
    flags[layer] = not flags[layer]
    return replace(mask, **{kind: tuple(flags)})


def run(layers: int, first: int, length: int) -> SkipMask:
    """The mask that skips ``length`` whole layers from ``first`` on."""
    flags = tuple(first <= layer < first + length for layer in range(layers))
    return SkipMask(flags, flags)


def _nothing_and_singles(search: _Search) -> list[SkipMask]:
    return [SkipMask.none(search.layers), *(search.single(kind, layer) for kind, layer in search.sublayers())]


def _grow_runs(search: _Search, most: int) -> None:
    """Contiguous runs of whole layers, each longer as long as it may still pay.

    From every fourth start first, so that a budget of ``most`` masks which does not reach for all has looked everywhere.
    """
    enough = search.left - most
    for first in (start for offset in range(4) for start in search.skippable[offset::4]):
        misses = 0
        for length in range(1, search.skippable[-1] - first + 2):
            (score,) = search.ask([run(search.layers, first, length)])
            misses = misses + 1 if score < search.scores[search.best] - _SLACK else 0
            if search.left <= enough:
                return
            if misses >= _PATIENCE:
                break


def _knapsacks(search: _Search) -> list[SkipMask]:
    """For several budgets of lost agreement: the sub-layers that save most time within it, if losses added up."""
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


def _add_greedily(search: _Search) -> None:
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


def _change_best(search: _Search) -> None:
    """Flips of single sub-layers and swaps of a skipped for a kept one around the best, until none helps."""
    while not search.exhausted:
        before = search.best
        search.ask(flip(before, kind, layer) for kind, layer in search.sublayers())
        skipped = [part for part in search.sublayers() if getattr(before, part[0])[part[1]]]
        kept = [part for part in search.sublayers() if part not in skipped]
        cheapest = sorted(kept, key=lambda part: search.price(*part))[:_SHORTLIST]
        dearest = sorted(skipped, key=lambda part: -search.price(*part))[:_SHORTLIST]
        search.ask(flip(flip(before, *one), *other) for one in dearest for other in cheapest)
        if search.best == before:
            return

"""What does a study decode with first? What is foretold to be fastest, for the price of a few passes.

Every mask is first asked how often its first drafted token is the target's (:mod:`searches.predict.mask_search`); the most promising
are scanned whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from layerskip import SkipMask, SpeculativeConfig
from searches.app.checks import check_whole
from searches.predict.mask_search import MaskSearch, Runs, ask_runs, move_ends
from searches.predict.oracle import Oracle, Prediction
from searches.space.search_space import SearchSpace

_NEAR = 4  # masks near the best one that are scanned before what is best is asked again
_EARLY_SHARE = 3  # of the scans one at most may come before the search has ended
_EARLY = 2  # first layers of runs that are bridged
_STEPS = (8, 4, 2)  # between the lengths of those
_APART = 6  # layers between where other runs begin, and between single sub-layers
_DOUBLED = range(8)  # powers of two that those runs are long, up to the last layer


@dataclass(frozen=True)
class ProposalSettings:
    """How much is foretold before anything is decoded.

    Args:
        screened: the most masks asked about their first drafted token; None takes all contiguous runs of layers, and beside
            them four for each sub-layer that may be skipped, 200 at least.
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
        layers = len(space.skippable)
        return self.screened if self.screened is not None else max(200, 8 * layers) + layers * (layers + 1) // 2


def propose(
    oracle: Oracle,
    space: SearchSpace,
    settings: ProposalSettings,
    on_mask: Callable[[], None] = lambda: None,
    also: Sequence[SkipMask] = (),
    on_best: Callable[[SpeculativeConfig], None] | None = None,
) -> list[Prediction]:
    """The masks that are foretold to be fastest, best first.

    Args:
        oracle: foretells.
        space: which layers may be skipped, and how far drafts may go.
        settings: how much to foretell.
        on_mask: called for every mask that is asked about.
        also: further masks to ask about.
        on_best: called with what is foretold to be fastest, scan by scan, and with what the first drafted tokens make look
            faster than that. For who listens some of the scans come early, as soon as a part of the search ends.
    """
    listener = on_best or (lambda _: None)
    scans = _Scans(oracle, settings.scanned, listener)

    def look(config: SpeculativeConfig) -> None:
        if not scans.found or search.scores[search.best] > scans.found[scans.best].speedup:
            listener(config)

    search = MaskSearch(oracle, space, settings.asked(space), on_mask, look)
    for best in search.explore(also):
        if on_best is not None and len(scans.found) < settings.scanned // _EARLY_SHARE:
            scans.add([best])
    return _refined(search, scans, settings)


def propose_bridged(
    oracle: Oracle, space: SearchSpace, settings: ProposalSettings, on_mask: Callable[[], None] = lambda: None
) -> list[Prediction]:
    """The masks that are foretold to be fastest with what stands in for what they skip, best first.

    One long early run with one bridge is worth more than scattered skips, whatever these are worth when they are empty; so
    runs from the first layers that may be skipped are asked about, of every other length. That is so of the models that were
    looked at; of another one, later runs and single sub-layers are asked about, too, far apart. Then the ends of the best
    runs are moved. The space's own masks are asked about before all.
    """
    search = MaskSearch(oracle, space, settings.asked(space), on_mask)
    search.ask(SkipMask.parse(mask, space.layers) for mask in space.masks)
    end, found = space.skippable[-1] + 1, Runs()
    # Lengths that are far apart come first, so that a small budget has looked at long runs, too.
    lengths = dict.fromkeys(length for step in _STEPS for length in range(_STEPS[-1], end, step))
    enough = search.left // 2
    ask_runs(search, found, ((first, first + length) for length in lengths for first in space.skippable[:_EARLY]), enough)
    others = space.skippable[::_APART]
    ask_runs(search, found, ((first, min(end, first + 2**power)) for power in _DOUBLED for first in others), enough // 2)
    search.ask(search.single(kind, layer) for layer in others for kind in ("attention", "mlp"))
    move_ends(search, found)
    return _scanned(search, settings)


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
    bridged: Sequence[Oracle] = (),
    narrowed: Sequence[Oracle] = (),
) -> list[SpeculativeConfig]:
    """What a study tries first: lookups, as they are many times faster where the text repeats itself, then masks, best
    first.

    Arguments are those of :func:`propose`, and oracles of masks that are bridged, and of empty ones that draft from few
    tokens.
    """
    with_bridges = [found for other in bridged for found in propose_bridged(other, space, settings, on_mask)]
    few = [prediction for other in narrowed for prediction in propose(other, space, settings, on_mask, also)]
    found = propose(oracle, space, settings, on_mask, also)
    # As many of each make: what is foretold of one make may err otherwise than of another.
    every = (*found, *_best_first(with_bridges, settings), *_best_first(few, settings))
    ranked = sorted(every, key=lambda prediction: -prediction.speedup)
    configs = [prediction.config for prediction in (*propose_lookups(oracle, space, settings.lookups), *ranked)]
    if found and space.siblings and not oracle.foretells(branching := replace(found[0].config, siblings=space.siblings)):
        configs.insert(configs.index(found[0].config) + 1, branching)
    return configs


def _scanned(search: MaskSearch, settings: ProposalSettings) -> list[Prediction]:
    """What is foretold of the most promising masks, best first."""
    return _best_first(search.oracle.predict(search.foremost(settings.scanned)), settings)


def _refined(search: MaskSearch, scans: _Scans, settings: ProposalSettings) -> list[Prediction]:
    """The same, where a part of the scans is left for masks near the best one: whole scans see what few positions do not."""
    foremost = search.foremost(settings.scanned)
    first = foremost[: -(-len(foremost) * 2 // 3)]
    for begin in range(0, len(first), _NEAR):
        scans.add(first[begin : begin + _NEAR])
    while scans.left:
        search.ask(near := search.near(scans.best))
        asked = sorted((mask for mask in near if mask in search.scores), key=lambda mask: -search.scores[mask])
        some = [mask for mask in (*asked, *foremost) if mask not in scans.found][:_NEAR]
        if not some:
            break
        scans.add(some)
    return _best_first(scans.found.values(), settings)


class _Scans:
    """What whole scans foretell, of so many masks at most; says what is best after each."""

    def __init__(self, oracle: Oracle, most: int, on_best: Callable[[SpeculativeConfig], None]) -> None:
        self.found: dict[SkipMask, Prediction] = {}
        self._oracle, self._most, self._on_best = oracle, most, on_best

    @property
    def left(self) -> int:
        """How many masks may still be scanned."""
        return self._most - len(self.found)

    @property
    def best(self) -> SkipMask:
        """The one that is foretold to be fastest."""
        return max(self.found, key=lambda mask: self.found[mask].speedup)

    def add(self, masks: Sequence[SkipMask]) -> None:
        """Scan those that were not yet, as far as scans are left."""
        new = [mask for mask in masks if mask not in self.found][: self.left]
        if new:
            self.found.update(zip(new, self._oracle.predict(new), strict=True))
            self._on_best(self.found[self.best].config)


def _best_first(found: Iterable[Prediction], settings: ProposalSettings) -> list[Prediction]:
    return sorted(found, key=lambda prediction: -prediction.speedup)[: settings.enqueued]

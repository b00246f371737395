"""Proposals of the configurations that a study tries first: those with the greatest predicted speedups.

All candidate masks are screened by how often their first drafted token is the target's
(:mod:`searches.predict.mask_search`). Only the most promising ones are scanned in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from layerskip import SkipMask, SpeculativeConfig
from searches.app.checks import check_whole
from searches.predict.mask_search import MaskSearch
from searches.predict.predictor import Prediction, SpeedupPredictor
from searches.space.search_space import SearchSpace

_LOOKUPS = 3  # best prompt lookups that become trials
_NEIGHBOURS = 4  # neighbours of the best mask that are scanned before its neighbours are listed again
_EARLY_LAYERS = 2  # first layers of the runs that are replaced
_STEPS = (8, 4, 2)  # between the lengths of those runs
_SPACING = 6  # layers between the starts of other runs, and between single sub-layers
_POWERS = range(8)  # of two: lengths of other runs, up to the last layer
_MARGIN = 0.3
"""Log speedup by which screening may underestimate the best mask: few positions, runs of agreement, siblings, stop rules."""


@dataclass(frozen=True)
class Limits:
    """What ends a search for masks early.

    Args:
        is_over: returns whether time has run out.
        to_beat: the measured speedup below which masks are of no use; 0 if nothing was measured.
        report: takes a sentence on what was left out.
    """

    is_over: Callable[[], bool] = lambda: False
    to_beat: float = 0.0
    report: Callable[[str], object] = lambda _: None


@dataclass(frozen=True)
class ProposalSettings:
    """Amount of prediction before anything is decoded.

    Args:
        screened: the most masks to screen by their first drafted token; None for at least 200. Those are all
            contiguous runs of layers and four further masks for each sub-layer that may be skipped.
        scanned: the most of them to scan in full.
        enqueued: the number of best masks that become trials.
    """

    screened: int | None = None
    scanned: int = 12
    enqueued: int = 6

    def __post_init__(self) -> None:
        for name in ("screened", "scanned", "enqueued"):
            value = getattr(self, name)
            if value is not None or name != "screened":
                check_whole(f"scan.proposals.{name}", value)

    def budget(self, space: SearchSpace) -> int:
        """Return the most masks of a space to screen."""
        layers = len(space.skippable)
        return self.screened if self.screened is not None else max(200, 8 * layers) + layers * (layers + 1) // 2


def propose(
    predictor: SpeedupPredictor,
    space: SearchSpace,
    settings: ProposalSettings,
    on_mask: Callable[[], object] = lambda: None,
    on_best: Callable[[SpeculativeConfig], None] = lambda _: None,
    limits: Limits = Limits(),
) -> list[Prediction]:
    """Propose the masks with the greatest predicted speedups, best first.

    Args:
        on_best: called with every configuration that screening expects to be the best so far.
        limits: what ends the search early.
    """

    def may_win() -> bool:
        """Return whether a mask may be faster than the leader, errors of screening included."""
        return search.scores[search.best] * math.exp(_MARGIN) >= limits.to_beat

    search = MaskSearch(predictor, space, settings.budget(space), on_mask, on_best, limits.is_over)
    search.screen_structured()
    if not limits.is_over() and not may_win():
        limits.report(
            f"{len(search.scores)} masks screened: the best is expected at {search.scores[search.best]:.2f} x. As the "
            f"leader has {limits.to_beat:.2f} x, none is scanned or tried"
        )
        return []
    search.improve()
    if limits.is_over():
        limits.report(f"its share of the budget ended after {len(search.scores)} masks were screened")
        if not may_win():
            return []
    return _best_first(_scan_best(search, settings.scanned, limits), settings.enqueued)


def _scan_best(search: MaskSearch, budget: int, limits: Limits) -> list[Prediction]:
    """Scan the most promising masks, then neighbours of the best one with the last third of the budget.

    Full scans rank masks that screening on few positions cannot. Without time, none is scanned after the first.
    """
    found: dict[SkipMask, Prediction] = {}

    def is_done() -> bool:
        return len(found) >= budget or (bool(found) and limits.is_over())

    def scan(masks: Sequence[SkipMask]) -> None:
        new = [mask for mask in masks if mask not in found][: budget - len(found)]
        if new and not is_done():
            found.update(zip(new, search.predictor.predict(new), strict=True))

    promising = search.best_masks(budget)
    first = promising[: -(-len(promising) * 2 // 3)]
    for begin in range(0, len(first), _NEIGHBOURS):
        scan(first[begin : begin + _NEIGHBOURS])
    while not is_done():
        best = max(found, key=lambda mask: found[mask].speedup)
        search.screen(neighbours := search.neighbours(best))
        screened = sorted((mask for mask in neighbours if mask in search.scores), key=lambda mask: -search.scores[mask])
        new = [mask for mask in (*screened, *promising) if mask not in found][:_NEIGHBOURS]
        if not new:
            break
        scan(new)
    if limits.is_over() and len(found) < budget:
        limits.report(f"its share of the budget ended after {len(found)} of {budget} masks were scanned")
    return list(found.values())


def propose_runs(
    predictor: SpeedupPredictor,
    space: SearchSpace,
    settings: ProposalSettings,
    on_mask: Callable[[], object] = lambda: None,
    limits: Limits = Limits(),
) -> list[Prediction]:
    """Propose the masks with the greatest predicted speedups when their skips are filled, best first.

    One long early run with one replacement is faster than scattered skips, whatever these reach when empty. So the search
    screens runs of every other length from the first layers that may be skipped. That held for the models that were
    examined; for others, it screens later runs and single sub-layers far apart, too. Then it moves the ends of the best
    runs. The space's own masks are screened first.
    """
    search = MaskSearch(predictor, space, settings.budget(space), on_mask, is_over=limits.is_over)
    search.screen(SkipMask.parse(mask, space.layers) for mask in space.masks)
    end = space.skippable[-1] + 1
    # Lengths far apart come first, so that a small budget covers long runs, too.
    lengths = dict.fromkeys(length for step in _STEPS for length in range(_STEPS[-1], end, step))
    reserve = search.left // 2
    search.screen_runs(((first, first + length) for length in lengths for first in space.skippable[:_EARLY_LAYERS]), reserve)
    others = space.skippable[::_SPACING]
    search.screen_runs(((first, min(end, first + 2**power)) for power in _POWERS for first in others), reserve // 2)
    search.screen(search.single(sublayer, layer) for layer in others for sublayer in ("attention", "mlp"))
    search.move_ends()
    if limits.is_over():
        limits.report(f"its share of the budget ended after {len(search.scores)} filled masks were screened")
    return _best_first(predictor.predict(search.best_masks(settings.scanned)), settings.enqueued)


def propose_lookups(predictor: SpeedupPredictor, space: SearchSpace) -> list[Prediction]:
    """Propose the prompt lookups with the greatest predicted speedups, best first. Their drafts depend on the text alone."""
    configs = [config for config in space.lookups() if predictor.can_predict(config)]
    return _best_first([Prediction(config, predictor.speedup(config), 0.0) for config in configs], _LOOKUPS)


def propose_all(
    predictor: SpeedupPredictor,
    space: SearchSpace,
    settings: ProposalSettings,
    on_mask: Callable[[], object] = lambda: None,
    filled: Sequence[SpeedupPredictor] = (),
    narrowed: Sequence[SpeedupPredictor] = (),
    limits: Limits = Limits(),
) -> list[SpeculativeConfig]:
    """Propose the configurations that a study tries first: lookups, then masks, best first.

    Lookups come first because they are many times faster where the text repeats itself. Other arguments are those of
    :func:`propose`.

    Args:
        predictor: predicts masks with empty skips, and lookups.
        filled: predictors of masks whose skips are not empty.
        narrowed: predictors of masks with empty skips that draft from a reduced vocabulary.
    """
    with_replacements = [found for other in filled for found in propose_runs(other, space, settings, on_mask, limits)]
    with_head = [found for other in narrowed for found in propose(other, space, settings, on_mask, limits=limits)]
    plain = propose(predictor, space, settings, on_mask, limits=limits)
    # Equally many of each group, because prediction errors may differ between groups.
    groups = [plain, *(_best_first(group, settings.enqueued) for group in (with_replacements, with_head))]
    ranked = _best_first([found for group in groups for found in group])
    configs = [prediction.config for prediction in (*propose_lookups(predictor, space), *ranked)]
    siblings = space.values("layer_skip", "siblings")[1]
    if plain and siblings:
        # Trees are not predicted, so they are tried with the best mask.
        configs.insert(configs.index(plain[0].config) + 1, replace(plain[0].config, siblings=siblings))
    return configs


def _best_first(predictions: Iterable[Prediction], maximum: int | None = None) -> list[Prediction]:
    return sorted(predictions, key=lambda prediction: -prediction.speedup)[:maximum]

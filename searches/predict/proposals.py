"""Proposals of the configurations that a study tries first: those with the greatest predicted speedups.

All candidate masks are screened by how often their first drafted token is the target's
(:mod:`searches.predict.mask_search`). Only the most promising ones are scanned in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from layerskip import DraftPlan, SpeculativeConfig
from searches.app.checks import check_whole
from searches.predict.mask_search import MaskSearch, PlanSearch, Prediction, Screening, SearchControl, SpeedupPredictor
from searches.space.search_space import SearchSpace

_LOOKUPS = 3  # best prompt lookups that become trials
_PLANS = 2  # best plans of fewer bits that do
_NEIGHBOURS = 4  # neighbours of the best mask that are scanned before its neighbours are listed again
_MARGIN = 0.3
"""Log speedup by which screening may underestimate the best mask: few positions, runs of agreement, stop rules."""


@dataclass(frozen=True)
class ProposalSettings:
    """Amount of prediction before anything is decoded.

    Args:
        screened: the most plans of a method to screen by their first drafted token; None for at least 200. Those are all
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


def propose_plans(
    predictor: SpeedupPredictor, space: SearchSpace, settings: ProposalSettings, control: SearchControl = SearchControl()
) -> list[Prediction]:
    """Propose the plans of fewer bits with the greatest predicted speedups, even slow ones: a lookup may precede."""
    if not predictor.profile.shares:
        return []
    search = PlanSearch(predictor, space, settings.budget(space), control)
    search.screen_structured()
    if not search.scores:
        control.report("no format of all sub-layers fits space.memory, so no plan of fewer bits is scanned")
        return []
    if not control.is_over():
        search.improve()
    found = _scan_best(search, settings.scanned, control)
    return _best_first([each for each in found if space.allows(each.config)], _PLANS)


def propose(
    predictor: SpeedupPredictor, space: SearchSpace, settings: ProposalSettings, control: SearchControl = SearchControl()
) -> list[Prediction]:

    def may_win() -> bool:
        return search.scores[search.best] * math.exp(_MARGIN) >= control.to_beat

    search = MaskSearch(predictor, space, settings.budget(space), control)
    search.screen_structured()
    if not control.is_over() and not may_win():
        control.report(
            f"{len(search.scores)} masks screened: the best is expected at {search.scores[search.best]:.2f} x. As the "
            f"leader has {control.to_beat:.2f} x, none is scanned or tried"
        )
        return []
    search.improve()
    if control.is_over():
        control.report(f"its share of the budget ended after {len(search.scores)} masks were screened")
        if not may_win():
            return []
    return _best_first(_scan_best(search, settings.scanned, control), settings.enqueued)


def _scan_best(search: Screening, budget: int, control: SearchControl) -> list[Prediction]:
    """Scan the most promising masks, then neighbours of the best one with the last third of the budget.

    Full scans rank masks that screening on few positions cannot. Without time, none is scanned after the first.
    """
    found: dict[DraftPlan, Prediction] = {}

    def is_done() -> bool:
        return len(found) >= budget or (bool(found) and control.is_over())

    def scan(masks: Sequence[DraftPlan]) -> None:
        new = [mask for mask in masks if mask not in found][: budget - len(found)]
        if new and not is_done():
            found.update(zip(new, search.predictor.predict(new), strict=True))

    promising = search.best_first(search.scores)[:budget]
    first = promising[: -(-len(promising) * 2 // 3)]
    for begin in range(0, len(first), _NEIGHBOURS):
        scan(first[begin : begin + _NEIGHBOURS])
    while not is_done():
        best = max(found, key=lambda mask: found[mask].speedup)
        search.screen(neighbours := search.neighbours(best))
        new = [mask for mask in (*search.best_first(neighbours), *promising) if mask not in found][:_NEIGHBOURS]
        if not new:
            break
        scan(new)
    if control.is_over() and len(found) < budget:
        control.report(f"its share of the budget ended after {len(found)} of {budget} masks were scanned")
    return list(found.values())


def propose_lookups(predictor: SpeedupPredictor, space: SearchSpace) -> list[Prediction]:
    """Propose the prompt lookups with the greatest predicted speedups, best first. Their drafts depend on the text alone."""
    configs = [config for config in space.lookups() if predictor.can_predict(config)]
    return _best_first([Prediction(config, predictor.speedup(config)) for config in configs], _LOOKUPS)


def propose_all(
    predictor: SpeedupPredictor, space: SearchSpace, settings: ProposalSettings, control: SearchControl = SearchControl()
) -> list[SpeculativeConfig]:
    """Propose the configurations that a study tries first: lookups, then plans of fewer bits, then masks, best first.

    Lookups come first because they are many times faster where the text repeats itself. Masks come last because a sub-layer
    that is skipped loses much more than one that is read at fewer bits.
    """
    found = propose_lookups(predictor, space)
    for method, search in (("quantized", propose_plans), ("layer_skip", propose)):
        found += search(predictor, space, settings, control) if method in predictor.predicted else []
    return [prediction.config for prediction in found]


def _best_first(predictions: Iterable[Prediction], maximum: int) -> list[Prediction]:
    return sorted(predictions, key=lambda prediction: -prediction.speedup)[:maximum]

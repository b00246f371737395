"""Search for the best short empty skips, which bridged masks have to beat."""

from __future__ import annotations

from layerskip import SkipMask
from searches.app.resume_log import ResultLog
from searches.predict.mask_search import MaskSearch, screen_runs
from searches.predict.scan_predictor import ScanPredictor
from searches.space.search_space import SearchSpace

_EDGE = 2  # first and last layers that are kept
_LENGTHS = range(1, 5)  # layers of a run that may pay without a bridge
_SCREENED = 400  # masks at most


def short_skips(predictor: ScanPredictor, depth: int, most: int, screenings: ResultLog) -> list[SkipMask]:
    """Return the single sub-layers and short runs with the highest expected speedup as empty skips, best first.

    The bridged masks are chosen for their speedup with bridges, so the best empty skips need a search of their own.

    Args:
        predictor: screens the masks.
        depth: longest draft length.
        most: number of masks.
        screenings: receives the seconds of screening.
    """
    edge = _EDGE if predictor.layers > 2 * _EDGE else 0
    space = SearchSpace(predictor.layers, ["layer_skip"], edge, edge, (1, depth))
    logged = 0.0

    def log_seconds() -> None:
        nonlocal logged
        if predictor.screening_seconds > logged:
            screenings.add(str(len(screenings)), predictor.screening_seconds - logged)
            logged = predictor.screening_seconds

    search = MaskSearch(predictor, space, _SCREENED, log_seconds)
    search.screen(search.single(*part) for part in search.sublayers())
    screen_runs(search, {}, ((first, first + length) for length in _LENGTHS for first in space.skippable))
    return search.best_masks(most)

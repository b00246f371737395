"""Which few sub-layers are best left out with nothing in their place? What bridged masks are to beat."""

from __future__ import annotations

from layerskip import SkipMask
from searches.app.resume_log import ResultLog
from searches.predict.mask_search import MaskSearch, ask_runs
from searches.predict.scan_oracle import ScanOracle
from searches.space.search_space import SearchSpace

_EDGE = 2  # first and last layers that are kept
_LENGTHS = range(1, 5)  # layers of a run that may pay when it is left empty
_ASKED = 400  # masks at most


def short_skips(oracle: ScanOracle, depth: int, most: int, screenings: ResultLog) -> list[SkipMask]:
    """Single sub-layers and short runs that seem worth most when they are left empty, best first.

    Bridged masks are chosen for what they are worth bridged; what empty skips reach is told by those that suit them.

    Args:
        oracle: foretells.
        depth: the longest draft.
        most: how many.
        screenings: takes the seconds that asking took.
    """
    edge = _EDGE if oracle.layers > 2 * _EDGE else 0
    space = SearchSpace(oracle.layers, ["layer_skip"], edge, edge, (1, depth))
    told = 0.0

    def keep_seconds() -> None:
        nonlocal told
        if oracle.screening_seconds > told:
            screenings.add(str(len(screenings)), oracle.screening_seconds - told)
            told = oracle.screening_seconds

    search = MaskSearch(oracle, space, _ASKED, keep_seconds)
    search.ask(search.single(*part) for part in search.sublayers())
    ask_runs(search, {}, ((first, first + length) for length in _LENGTHS for first in space.skippable))
    return search.foremost(most)

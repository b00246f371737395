"""The configurations that a study tries first.

Random masks skip half of all layers, and a search that starts from them never recovers.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerskip import SpeculativeConfig
from layerskip.config import methods
from searches.space.search_space import SearchSpace, structured_masks


def starting_points(
    space: SearchSpace, proposed: Sequence[SpeculativeConfig] = (), scanned: bool = False
) -> list[SpeculativeConfig]:
    """Return the configurations to try first.

    They are plain decoding, the declared first configurations of each method, the proposals, and cascades of a
    lookup with the best of these. Where masks were not scanned, single skips, contiguous runs and sparse masks are tried.

    Args:
        space: the search space.
        proposed: predicted configurations, the fastest first.
        scanned: whether masks were scanned, so that proposals were chosen among structured masks.
    """
    points = [SpeculativeConfig()]
    for method in space.available_methods:
        starts = space.starts(method)
        paired = space.after_lookup(starts) if methods()[method].paired else []
        points += [*starts[:1], *paired, *starts[1:]]
    predicted = [config for config in proposed if config.method == "layer_skip"]
    points += [*proposed, *space.after_lookup(predicted)]
    if "layer_skip" in space.available_methods:
        points += space.skip_starts([*space.masks, *(() if scanned or predicted else structured_masks(space))])
    if not any(config.method == "cascade" and not config.members[1].head for config in points):
        points += space.after_lookup([config for config in points if config.method in space.second_methods])
    return list(dict.fromkeys(points))

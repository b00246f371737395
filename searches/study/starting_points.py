"""The configurations that a study tries first.

Random masks skip half of all layers, and a search that starts from them never recovers.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerskip import SpeculativeConfig
from layerskip.config import kinds
from searches.space.search_space import SearchSpace, structured_masks


def starting_points(
    space: SearchSpace, proposed: Sequence[SpeculativeConfig] = (), scanned: bool = False
) -> list[SpeculativeConfig]:
    """Return the configurations to try first.

    They are plain decoding, the declared first configurations of each kind of drafter, the proposals, and cascades of a
    lookup with the best of these. Where masks were not scanned, single skips, contiguous runs and sparse masks are tried.

    Args:
        space: the search space.
        proposed: predicted configurations, the fastest first.
        scanned: whether masks were scanned, so that proposals were chosen among structured masks.
    """
    points = [SpeculativeConfig()]
    for kind in space.available_kinds:
        starts = space.starts(kind)
        paired = space.after_lookup(starts) if kinds()[kind].paired else []
        points += [*starts[:1], *paired, *starts[1:]]
    predicted = [config for config in proposed if config.kind == "layer_skip"]
    points += [*proposed, *space.after_lookup(predicted)]
    if "layer_skip" in space.available_kinds:
        points += space.skip_starts([*space.masks, *(() if scanned or predicted else structured_masks(space))])
    if not any(config.kind == "cascade" and not config.members[1].head for config in points):
        points += space.after_lookup([config for config in points if config.kind in space.second_kinds])
    return list(dict.fromkeys(points))

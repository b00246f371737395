"""The configurations that a study tries first.

Random masks skip half of all layers, and a search that starts from them never recovers.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerskip import SpeculativeConfig
from searches.space import registry
from searches.space.cascade import after_lookup
from searches.space.layer_skip import skip_starts, structured_masks
from searches.space.search_space import SearchSpace


def starting_points(
    space: SearchSpace, proposed: Sequence[SpeculativeConfig] = (), scanned: bool = False
) -> list[SpeculativeConfig]:
    """Return the configurations to try first.

    They are plain decoding, the usual settings of each kind of drafter, the proposals, and cascades of a lookup with the
    best of these. Where masks were not scanned, single skips, contiguous runs and sparse masks are tried.

    Args:
        space: the search space.
        proposed: predicted configurations, the fastest first.
        scanned: whether masks were scanned, so that proposals were chosen among structured masks, too.
    """
    points = [SpeculativeConfig()]
    for kind in space.available_kinds:
        starts = list(registry.searched(kind).starts(space))
        if kind == "token_recycling":
            starts += after_lookup(space, starts)
        elif kind in space.heads:
            starts = [*starts[:1], *after_lookup(space, starts), *starts[1:]]
        points += starts
    predicted = [config for config in proposed if config.kind == "layer_skip"]
    points += [*proposed, *after_lookup(space, predicted)]
    if "layer_skip" in space.available_kinds:
        points += skip_starts(space, (*space.masks, *(() if scanned or predicted else structured_masks(space))))
    if not any(config.kind == "cascade" and not config.members[1].head for config in points):
        points += after_lookup(space, [config for config in points if config.kind in space.second_kinds])
    return list(dict.fromkeys(points))

"""The configurations that a study tries first: cheap ones, structured ones and predicted ones.

Random masks skip half of all layers, and a search that starts from them never recovers.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerskip import SpeculativeConfig
from searches.space import registry
from searches.space.cascade import after_lookup
from searches.space.layer_skip import skip_starts, structured_masks
from searches.space.search_space import SearchSpace


def starting_points(space: SearchSpace, proposed: Sequence[SpeculativeConfig] = ()) -> list[SpeculativeConfig]:
    """Plain decoding, the starts of each kind of drafter, the proposals, and cascades of a lookup and the best of those.

    Without proposals of layer skipping, its starts are single skips, contiguous runs and sparse masks.

    Args:
        space: of the study.
        proposed: predicted configurations, the fastest first.
    """
    points = [SpeculativeConfig()]
    for kind in space.arms:
        starts = list(registry.searched(kind).starts(space))
        if kind == "token_recycling":
            starts += after_lookup(space, starts)
        elif kind in space.heads:
            starts = [*starts[:1], *after_lookup(space, starts), *starts[1:]]
        points += starts
    predicted = [config for config in proposed if config.kind == "layer_skip"]
    points += [*proposed, *after_lookup(space, predicted)]
    if "layer_skip" in space.arms:
        # Structured masks were among those that a prediction was made for.
        points += skip_starts(space, (*space.masks, *(() if predicted else structured_masks(space))))
    if not any(config.kind == "cascade" and not config.members[1].head for config in points):
        points += after_lookup(space, [config for config in points if config.kind in space.seconds])
    return list(dict.fromkeys(points))

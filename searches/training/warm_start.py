"""Which trained bridges may others begin as? Those of the same bridge_spec whose mask is most alike."""

from __future__ import annotations

from pathlib import Path

from layerskip import SkipMask, Target
from layerskip.models.bridge import Bridges, BridgeShape, load_bridges


class Neighbours:
    """Bridges of a target that were trained before.

    Args:
        target: the model.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._places: dict[BridgeShape, Path] = {}

    def add(self, shape: BridgeShape, folder: Path) -> None:
        """Let others begin as what lies in a folder."""
        self._places[shape] = folder

    def nearest(self, shape: BridgeShape) -> Bridges | None:
        """Those of the same kind and size whose mask differs least, of several the last ones; None without any."""
        alike = [other for other in self._places if other.is_like(shape)]
        found = min(reversed(alike), key=lambda other: _distance(shape, other), default=None)
        return None if found is None else load_bridges(self._places[found], self._target)


def _distance(one: BridgeShape, other: BridgeShape) -> int:
    """In how many sub-layers two masks differ."""
    masks = [SkipMask.parse(shape.mask, shape.layers) for shape in (one, other)]
    mine, theirs = ((*mask.attention, *mask.mlp) for mask in masks)
    return sum(a != b for a, b in zip(mine, theirs, strict=True))

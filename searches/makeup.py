"""How may a mask draft? What stands in for what it skips, and from how many tokens it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BRIDGES = ("none", "mean", "linear", "mlp")
RANKED = ("linear", "mlp")


@dataclass(frozen=True)
class Makeup:
    """How a mask drafts: what stands in for what it skips, and from how many tokens it drafts.

    Args:
        bridge: ``none``, ``mean``, ``linear``, or ``mlp`` for such a map and a small gated MLP beside it.
        rank: of the map; 0 for a full one.
        tokens: the size of the draft head; 0 for the whole vocabulary.
        width: of the MLP; 0 for other kinds.
    """

    bridge: str = "none"
    rank: int = 0
    tokens: int = 0
    width: int = 0


def makeups(bridges: Sequence[str], ranks: Sequence[int], heads: Sequence[int], widths: Sequence[int] = ()) -> list[Makeup]:
    """All that a space can make of a mask, empty skips over the whole vocabulary first."""
    found = [
        Makeup(bridge, rank, tokens, width)
        for bridge in bridges
        for rank in (ranks if bridge in RANKED else (0,))
        for width in (widths if bridge == "mlp" else (0,))
        for tokens in heads
    ]
    return list(dict.fromkeys([Makeup(), *found]))

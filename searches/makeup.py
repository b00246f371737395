"""How may a mask draft? What stands in for what it skips, and from how many tokens it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BRIDGES = ("none", "mean", "linear")


@dataclass(frozen=True)
class Makeup:
    """How a mask drafts: what stands in for what it skips, and from how many tokens it drafts.

    Args:
        bridge: ``none``, ``mean`` or ``linear``.
        rank: of linear bridges; 0 for full maps.
        tokens: the size of the draft head; 0 for the whole vocabulary.
    """

    bridge: str = "none"
    rank: int = 0
    tokens: int = 0


def makeups(bridges: Sequence[str], ranks: Sequence[int], heads: Sequence[int]) -> list[Makeup]:
    """All that a space can make of a mask, empty skips over the whole vocabulary first."""
    found = [
        Makeup(bridge, rank, tokens)
        for bridge in bridges
        for rank in (ranks if bridge == "linear" else (0,))
        for tokens in heads
    ]
    return list(dict.fromkeys([Makeup(), *found]))

"""Bridge specs: the replacement of the sub-layers that a self-draft skips, and the tokens that it drafts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from layerskip import SkipMask, SpeculativeConfig

BRIDGES = ("none", "mean", "linear", "mlp")
RANKED = ("linear", "mlp")


@dataclass(frozen=True)
class BridgeSpec:
    """The kind and size of a mask's bridges, and the size of its draft head.

    Args:
        bridge: ``none``, ``mean`` (a constant vector), ``linear`` (an affine map), or ``mlp`` (an affine map with a small
            gated MLP in parallel).
        rank: of the map; 0 for a full-rank one.
        tokens: of the draft head; 0 for the whole vocabulary.
        width: of the MLP; 0 for other kinds.
    """

    bridge: str = "none"
    rank: int = 0
    tokens: int = 0
    width: int = 0


def bridge_specs(
    bridges: Sequence[str], ranks: Sequence[int], heads: Sequence[int], widths: Sequence[int] = ()
) -> list[BridgeSpec]:
    """Return all specs that can be made of these kinds and sizes. The first has no bridges and the whole vocabulary."""
    found = [
        BridgeSpec(bridge, rank, tokens, width)
        for bridge in bridges
        for rank in (ranks if bridge in RANKED else (0,))
        for width in (widths if bridge == "mlp" else (0,))
        for tokens in heads
    ]
    return list(dict.fromkeys([BridgeSpec(), *found]))


class BridgeSource(Protocol):
    """Source of the folders of bridges and draft heads, such as :class:`searches.bridges.store.BridgeStore`."""

    def bridge(self, mask: SkipMask, bridge_spec: BridgeSpec) -> str:
        """Return the folder of a mask's bridges; empty if the spec has none or they would not improve the draft."""

    def head(self, size: int) -> str:
        """Return the folder of a draft head of ``size`` tokens of the target; empty for the whole vocabulary."""

    def draft_model_head(self, draft: str, size: int) -> str:
        """Return the folder of a draft head of ``size`` tokens of a draft model; empty for its whole vocabulary."""

    def bridge_spec(self, config: SpeculativeConfig) -> BridgeSpec:
        """Return the spec of a configuration whose folders came from here."""

"""What does a mask draft with? The bridges and the draft head that a bridge_spec asks for, from the bridge_store that has them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from layerskip import SkipMask, SpeculativeConfig
from layerskip.costs.cost_model import NO_AIDS, Aids
from layerskip.models.bridge import Bridges
from layerskip.scan.scan import Scan, Scanner
from searches.space.bridge_spec import BridgeSpec
from searches.training.bridge_store import BridgeStore


class BridgedDrafts:
    """Masks that all draft in one way.

    Args:
        bridge_spec: the way.
        bridge_store: where bridges and draft heads come from; without it the bridge_spec asks for none.

    Attributes:
        tokens: ``[K]`` long, that masks draft from; None for the whole vocabulary.
    """

    def __init__(self, bridge_spec: BridgeSpec, bridge_store: BridgeStore | None) -> None:
        self.bridge_spec, self._bridge_store = bridge_spec, bridge_store
        self.tokens: Tensor | None = None if bridge_store is None else bridge_store.tokens(bridge_spec.tokens)

    def folders(self, mask: SkipMask) -> tuple[str, str]:
        """Those of a mask's bridges and of the draft head; empty where there are none."""
        if self._bridge_store is None:
            return "", ""
        return self._bridge_store.bridge(mask, self.bridge_spec), self._bridge_store.head(self.bridge_spec.tokens)

    def scan(
        self, scanner: Scanner, masks: Sequence[SkipMask], depth: int | None = None, floor: float | None = None
    ) -> list[Scan]:
        """Scan masks that draft so; arguments are those of :meth:`~layerskip.scan.scan.Scanner.scan`."""
        bridge_store, bridges = self._bridge_store, None
        if bridge_store is not None:
            bridges = [bridge_store.load(bridge_store.bridge(mask, self.bridge_spec), mask) for mask in masks]
        return scanner.scan(masks, depth=depth, floor=floor, bridges=bridges, tokens=self.tokens)

    def lasting(self, mask: SkipMask) -> bool:
        """Whether what a scan says of a mask is so on any day: its bridges may only have found no memory today."""
        return self._bridge_store is None or not self._bridge_store.lacks(mask, self.bridge_spec)

    def aids(self, mask: SkipMask) -> Aids:
        """What a mask drafts with, as it is charged for."""
        return NO_AIDS if self._bridge_store is None else self._bridge_store.aids(mask, self.bridge_spec)

    def trained_aids(self, bridges: Bridges) -> Aids:
        """The same with bridges that were trained since."""
        return Aids.of(
            bridges.shape, 0 if self._bridge_store is None else self._bridge_store.left_out(self.bridge_spec.tokens)
        )

    def fits(self, config: SpeculativeConfig) -> bool:
        """Whether a self-draft's bridges and draft head are those of the bridge_spec."""
        if self._bridge_store is None or not (config.bridge or config.draft_head):
            return self.bridge_spec == BridgeSpec() and not config.bridge and not config.draft_head
        return self._bridge_store.bridge_spec(config) == self.bridge_spec

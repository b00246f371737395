"""The bridges, draft head and costs of masks that draft with one bridge spec."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from layerskip import SkipMask, SpeculativeConfig
from layerskip.costs.cost_model import NO_EXTRAS, DraftExtras
from layerskip.models.bridge import Bridges
from layerskip.scan.scan import Scan, Scanner
from searches.space.bridge_spec import BridgeSpec
from searches.training.bridge_store import BridgeStore


class BridgedDrafts:
    """Drafts of masks with one bridge spec.

    Args:
        bridge_spec: the bridges and the draft head of every mask.
        bridge_store: the source of bridges and draft heads; None if the spec has none.

    Attributes:
        tokens: ``[K]`` int64, the tokens of the draft head; None for the whole vocabulary.
    """

    def __init__(self, bridge_spec: BridgeSpec, bridge_store: BridgeStore | None) -> None:
        self.bridge_spec, self._store = bridge_spec, bridge_store
        self.tokens: Tensor | None = None if bridge_store is None else bridge_store.tokens(bridge_spec.tokens)

    def folders(self, mask: SkipMask) -> tuple[str, str]:
        """Return the folders of a mask's bridges and of the draft head; empty if there are none."""
        if self._store is None:
            return "", ""
        return self._store.bridge(mask, self.bridge_spec), self._store.head(self.bridge_spec.tokens)

    def scan(
        self, scanner: Scanner, masks: Sequence[SkipMask], depth: int | None = None, floor: float | None = None
    ) -> list[Scan]:
        """Scan masks with their bridges; arguments are those of :meth:`~layerskip.scan.scan.Scanner.scan`.

        Args:
            scanner: of continuations.
            masks: to scan.
            depth: of drafts; None for the scanner's.
            floor: confidence down to which drafts are followed; None for all.
        """
        store, bridges = self._store, None
        if store is not None:
            bridges = [store.load(store.bridge(mask, self.bridge_spec), mask) for mask in masks]
        return scanner.scan(masks, depth=depth, floor=floor, bridges=bridges, tokens=self.tokens)

    def reproducible(self, mask: SkipMask) -> bool:
        """Return whether another process would scan the mask alike, since no bridges are missing for lack of memory."""
        return self._store is None or not self._store.failed(mask, self.bridge_spec)

    def extras(self, mask: SkipMask) -> DraftExtras:
        """Return the bridges and the draft head of a mask's draft, as costs count them."""
        return NO_EXTRAS if self._store is None else self._store.extras(mask, self.bridge_spec)

    def trained_extras(self, bridges: Bridges) -> DraftExtras:
        """Return the costs of a mask's draft with bridges that were trained since."""
        return DraftExtras.of(bridges.shape, 0 if self._store is None else self._store.left_out(self.bridge_spec.tokens))

    def matches(self, config: SpeculativeConfig) -> bool:
        """Return whether a self-draft's bridges and draft head are those of the spec."""
        if self._store is None or not (config.bridge or config.draft_head):
            return self.bridge_spec == BridgeSpec() and not config.bridge and not config.draft_head
        return self._store.bridge_spec(config) == self.bridge_spec

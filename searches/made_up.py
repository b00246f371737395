"""What does a mask draft with? The bridges and the draft head that a makeup asks for, from the shelf that has them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from layerskip import SkipMask, SpeculativeConfig
from layerskip.bridge import Bridges
from layerskip.costs import NO_AIDS, Aids
from layerskip.scan import Scan, Scanner

from .makeup import Makeup
from .shelf import Shelf


class MadeUp:
    """Masks that all draft in one way.

    Args:
        makeup: the way.
        shelf: where bridges and draft heads come from; without it the makeup asks for none.

    Attributes:
        tokens: ``[K]`` long, that masks draft from; None for the whole vocabulary.
    """

    def __init__(self, makeup: Makeup, shelf: Shelf | None) -> None:
        self.makeup, self._shelf = makeup, shelf
        self.tokens: Tensor | None = None if shelf is None else shelf.tokens(makeup.tokens)

    def folders(self, mask: SkipMask) -> tuple[str, str]:
        """Those of a mask's bridges and of the draft head; empty where there are none."""
        if self._shelf is None:
            return "", ""
        return self._shelf.bridge(mask, self.makeup), self._shelf.head(self.makeup.tokens)

    def scan(
        self, scanner: Scanner, masks: Sequence[SkipMask], depth: int | None = None, floor: float | None = None
    ) -> list[Scan]:
        """Scan masks that draft so; arguments are those of :meth:`~layerskip.scan.Scanner.scan`."""
        shelf, bridges = self._shelf, None
        if shelf is not None:
            bridges = [shelf.load(shelf.bridge(mask, self.makeup), mask) for mask in masks]
        return scanner.scan(masks, depth=depth, floor=floor, bridges=bridges, tokens=self.tokens)

    def lasting(self, mask: SkipMask) -> bool:
        """Whether what a scan says of a mask is so on any day: its bridges may only have found no memory today."""
        return self._shelf is None or not self._shelf.lacks(mask, self.makeup)

    def aids(self, mask: SkipMask) -> Aids:
        """What a mask drafts with, as it is charged for."""
        return NO_AIDS if self._shelf is None else self._shelf.aids(mask, self.makeup)

    def trained_aids(self, bridges: Bridges) -> Aids:
        """The same with bridges that were trained since."""
        return Aids.of(bridges.shape, 0 if self._shelf is None else self._shelf.left_out(self.makeup.tokens))

    def fits(self, config: SpeculativeConfig) -> bool:
        """Whether a self-draft's bridges and draft head are those of the makeup."""
        if self._shelf is None or not (config.bridge or config.draft_head):
            return self.makeup == Makeup() and not config.bridge and not config.draft_head
        return self._shelf.makeup(config) == self.makeup

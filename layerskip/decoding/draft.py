"""What does a drafter propose? Tokens, and the distributions they were drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layerskip.device.upload import upload


@dataclass(frozen=True)
class Draft:
    """Proposed tokens, still on the device.

    Args:
        tokens: ``[K]`` int64; K may be 0.
        parents: None for a chain, in which token i follows token i - 1; for a tree the token that each one follows, an
            earlier one, or -1 for the last token of the sequence.
        probs: ``[K, V]`` float32, the distribution that each token was drawn from, in a tree given the siblings before
            it; None where the draft is deterministic, hence one-hot.
        match: behind how many tokens of the context it was found in a text; 0 where it was not looked up.
        found: its tokens once more, on the host, where nothing but them goes through the pass and no model ran for them; it
            is deterministic then, and who passes it over has lost nothing.
        chances: of found tokens, how likely whoever found them thinks that each is said, with all before it on its branch;
            falling, in [0, 1], and empty where nobody knows.
        unsure: whether a stop rule ended it behind its first token; that may not depend on the token that was drawn.
    """

    tokens: Tensor
    parents: tuple[int, ...] | None = None
    probs: Tensor | None = None
    match: int = 0
    found: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    unsure: bool = False

    @classmethod
    def empty(cls, device: torch.device) -> Draft:
        """The draft without tokens."""
        return cls(torch.empty(0, dtype=torch.int64, device=device))

    @classmethod
    def of_tree(
        cls,
        tokens: Sequence[int],
        parents: Sequence[int],
        device: torch.device,
        match: int = 0,
        found: bool = False,
        chances: Sequence[float] = (),
    ) -> Draft:
        """A deterministic draft on the device; a tree of one branch is a chain, which is cheaper to verify.

        Args:
            tokens: of its nodes.
            parents: of its nodes.
            device: where to put it.
            match: as above.
            found: whether it costs nothing to pass it over; so it is where it was looked up.
            chances: of its nodes, as above.
        """
        if not tokens:
            return cls.empty(device)
        kept = tuple(tokens) if match or found else ()
        return cls(upload(tokens, device), _branches(parents), match=match, found=kept, chances=tuple(chances))

    def first(self, size: int) -> Draft:
        """A found draft's first tokens alone, at least one; what they follow is among them."""
        if size >= len(self.found):
            return self
        parents = None if self.parents is None else _branches(self.parents[:size])
        return replace(
            self, tokens=self.tokens[:size], parents=parents, found=self.found[:size], chances=self.chances[:size]
        )


def _branches(parents: Sequence[int]) -> tuple[int, ...] | None:
    """None where each token follows the one before."""
    return None if all(parent == node - 1 for node, parent in enumerate(parents)) else tuple(parents)

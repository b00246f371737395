"""``Draft``: the tokens that a drafter proposes, and the distributions that they were drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layerskip.device.transfer import copy_to_device, read_to_host

MAX_MATCH = 8  # tokens of a match; longer matches say no more


@dataclass(frozen=True)
class DeviceTree:
    """The shape of a tree that grew on the device, before the host has read it.

    Tokens beyond its size come last, as children of the root, and are never accepted. They fill the tree up to a number of
    tokens that the host knows.
    """

    parents: Tensor  # ``[K]`` int64, as in :class:`Draft`
    size: Tensor  # ``[1]`` int64: how many tokens count
    depth: int  # the most tokens of a branch


@dataclass(frozen=True)
class Draft:
    """Proposed tokens, on the device: a chain, or a tree whose root is the last token of the sequence.

    Args:
        tokens: ``[K]`` int64; K may be 0.
        parents: the parent of each token in a tree: the index of an earlier token, or -1 for the root. None for a chain, in
            which token i follows token i - 1. A :class:`DeviceTree` if only the device knows them.
        probs: ``[K, V]`` float32, the distribution that each token of a chain was drawn from. None for a deterministic
            draft, whose distributions are one-hot; trees have no other tokens.
        match_length: how many tokens of the context precede the place that the draft was copied from; 0 if it was not.
        lookup_tokens: the tokens once more, on the host, if no model ran for them. Such a draft is deterministic, and may be
            cut or declined at no loss. Empty for other drafts.
        path_probs: for each of the ``lookup_tokens``, the estimated probability that the target says it and all tokens
            before it on its branch, in [0, 1], not increasing; empty if unknown.
    """

    tokens: Tensor
    parents: tuple[int, ...] | DeviceTree | None = None
    probs: Tensor | None = None
    match_length: int = 0
    lookup_tokens: tuple[int, ...] = ()
    path_probs: tuple[float, ...] = ()

    @classmethod
    def empty(cls, device: torch.device) -> Draft:
        return cls(torch.empty(0, dtype=torch.int64, device=device))

    @classmethod
    def of_tree(cls, tokens: Sequence[int], parents: Sequence[int], device: torch.device) -> Draft:
        """Return a deterministic draft; a tree of one branch becomes a chain, which is cheaper to verify."""
        return cls(copy_to_device(tokens, device), chain_or_tree(parents)) if tokens else cls.empty(device)

    @classmethod
    def of_lookup(
        cls,
        tokens: Sequence[int],
        parents: Sequence[int],
        device: torch.device,
        match_length: int = 0,
        path_probs: Sequence[float] = (),
    ) -> Draft:
        """Return a deterministic draft for which no model ran."""
        draft = cls.of_tree(tokens, parents, device)
        return replace(draft, match_length=match_length, lookup_tokens=tuple(tokens), path_probs=tuple(path_probs))

    @property
    def known_parents(self) -> Sequence[int]:
        """The parent of each token, also in a chain. The host must know the draft's shape."""
        assert not isinstance(self.parents, DeviceTree)
        return range(-1, self.tokens.shape[0] - 1) if self.parents is None else self.parents

    def read_shape(self) -> Draft:
        """Return the draft with parents that the host knows, and with the tokens that count only; waits for the device."""
        if not isinstance(self.parents, DeviceTree):
            return self
        (size,), parents = read_to_host(self.parents.size, self.parents.parents)
        return replace(self, tokens=self.tokens[:size], parents=chain_or_tree(parents[:size]))

    def truncate(self, size: int) -> Draft:
        """Return the first ``size`` tokens of a lookup draft, at least one; their parents are among them."""
        if size >= len(self.lookup_tokens):
            return self
        return replace(
            self,
            tokens=self.tokens[:size],
            parents=chain_or_tree(self.known_parents[:size]),
            lookup_tokens=self.lookup_tokens[:size],
            path_probs=self.path_probs[:size],
        )


def chain_or_tree(parents: Sequence[int]) -> tuple[int, ...] | None:
    """Return the parents of a tree, or None if they form a chain."""
    return None if all(parent == node - 1 for node, parent in enumerate(parents)) else tuple(parents)

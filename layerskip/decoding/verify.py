"""The acceptance rule: it decides which drafted tokens the target accepts, and which token comes next.

It is a pure function of distributions: Fast Inference from Transformers via Speculative Decoding (arXiv
2211.17192), algorithm 1. A drafted token x is accepted with probability min(1, p(x) / q(x)); after the first rejection a
token is drawn from max(0, p - q), and after a fully accepted block from p. The result is distributed exactly as tokens
drawn from p one by one. A deterministic draft is a one-hot q; if p is one-hot too, the rule reduces to comparing tokens.

The tokens of a tree are deterministic: one that is drawn from p is accepted if it is a child of the token before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layerskip.decoding.draft import DeviceTree, Draft, chain_or_tree
from layerskip.decoding.sampling import draw
from layerskip.device.transfer import read_to_host


@dataclass(frozen=True)
class Verdict:
    """The result of verifying one draft; ``path`` holds indices in ``drafted``."""

    drafted: tuple[int, ...]
    accepted: int  # how many tokens the target accepted: the first ones of a chain, or those on ``path`` of a tree
    next_token: int  # the target's own token after them
    last: Tensor = field(compare=False, repr=False)  # ``[1]`` int64: next_token on the device, for a pass without transfer
    path: tuple[int, ...] | None = None  # of a tree's accepted tokens, each a child of the one before; None for a chain
    parents: tuple[int, ...] | None = None  # of a drafted tree; None for a chain, or one branch whose shape was read late
    late: Sequence[list[Any]] = field(default=(), compare=False, repr=False)  # values of tensors that were read with it

    @property
    def rows(self) -> list[int]:
        """The rows of the verified block that stay: the last token of the sequence, and the accepted ones."""
        return list(range(self.accepted + 1)) if self.path is None else [0, *(node + 1 for node in self.path)]

    @property
    def committed(self) -> list[int]:
        """The accepted tokens and the target's own token after them."""
        accepted = self.drafted[: self.accepted] if self.path is None else [self.drafted[node] for node in self.path]
        return [*accepted, self.next_token]


def verify(
    draft: Draft, target_probs: Tensor, generator: torch.Generator | None = None, late: Sequence[Tensor] = ()
) -> Verdict:
    """Accept the first tokens of a chain, or a branch of a tree from its root, and add one token.

    The host waits for the device once.

    Args:
        draft: K tokens; those of a chain with their distributions ``[K, V]`` float32, or None if deterministic.
        target_probs: ``[K + 1, V]`` float32 rows that sum to 1, or ``[K + 1]`` int64 if each row is one-hot. Row 0 is the
            target's distribution after the sequence, row i + 1 that after drafted token i and its ancestors, warped as the
            draft's distributions were.
        late: tensors to read in the same wait.

    Returns:
        The verdict; its ``committed`` tokens are distributed as the target's own.

    Raises:
        ValueError: the tokens of a tree were drawn.
    """
    if draft.parents is None:
        return _accept_chain(draft, target_probs, generator, late)
    if draft.probs is not None:
        raise ValueError("draft.probs: the tokens of a tree are deterministic")
    return _accept_tree(draft, target_probs, generator, late)


def _accept_chain(draft: Draft, target_probs: Tensor, generator: torch.Generator | None, late: Sequence[Tensor]) -> Verdict:
    size = draft.tokens.shape[0]
    if target_probs.dtype == torch.int64:
        # Compared on the host, because every kernel costs host time.
        tokens, *values = read_to_host(torch.cat((draft.tokens, target_probs)), *late)
        drafted, expected = tokens[:size], tokens[size:]
        count = next((i for i in range(size) if drafted[i] != expected[i]), size)
        return Verdict(tuple(drafted), count, expected[count], target_probs[count, None], late=values)
    chosen, vocabulary = draft.tokens[:, None], target_probs.shape[1]
    draft_probs = draft.probs
    if draft_probs is None:
        draft_probs = target_probs.new_zeros(size, vocabulary).scatter_(1, chosen, 1.0)
    p = target_probs[:size].gather(1, chosen)[:, 0]
    q = draft_probs.gather(1, chosen)[:, 0]
    # u * q < p is u < p / q without the division. It is strict so that p = 0 is never accepted at u = 0.
    uniform = torch.rand(size, device=p.device, generator=generator)
    accepted = (uniform * q < p).cumprod(0).sum(0, keepdim=True)
    # A row of zeros after the draft's rows makes the bonus token a residual like any other.
    q_row = torch.cat((draft_probs, draft_probs.new_zeros(1, vocabulary))).index_select(0, accepted)
    p_row = target_probs.index_select(0, accepted)
    residual = (p_row - q_row).clamp_min_(0.0)
    # p - q can vanish by rounding if p is close to q; the residual is then p itself.
    following = draw(torch.where(residual.sum(1, keepdim=True) > 0, residual, p_row), generator)
    (*drafted, count, token), *values = read_to_host(torch.cat((draft.tokens, accepted, following)), *late)
    return Verdict(tuple(drafted), count, token, following, late=values)


def _accept_tree(draft: Draft, target_probs: Tensor, generator: torch.Generator | None, late: Sequence[Tensor]) -> Verdict:
    tree, count = draft.parents, draft.tokens.shape[0]
    # A deterministic token is accepted with probability p, which is how often a draw from p gives that token.
    following = target_probs if target_probs.dtype == torch.int64 else draw(target_probs, generator)
    shape = (tree.parents, tree.size) if isinstance(tree, DeviceTree) else ()
    read, *values = read_to_host(torch.cat((draft.tokens, following, *shape)), *late)
    drafted, expected, rest = read[:count], read[count : 2 * count + 1], read[2 * count + 1 :]
    known: tuple[int, ...] | None
    if isinstance(tree, DeviceTree):
        size = rest[count]
        drafted, parents = drafted[:size], tuple(rest[:size])
        known = chain_or_tree(parents)
    else:
        parents = known = tuple(draft.known_parents)
    path, row, children = list[int](), 0, dict[tuple[int, int], int]()
    for node, child in enumerate(zip(parents, drafted, strict=True)):
        children.setdefault(child, node)
    while (node := children.get((row - 1, expected[row]), -1)) >= 0:
        path.append(node)
        row = node + 1
    return Verdict(tuple(drafted), len(path), expected[row], following[row, None], tuple(path), known, values)

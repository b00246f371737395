"""The exact acceptance rule: it decides which drafted tokens the target accepts, and which token comes next.

A pure function of distributions: Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192), algorithm 1.
A drafted token x is accepted with probability min(1, p(x) / q(x)); after the first rejection a token is drawn from
max(0, p - q), and after a fully accepted block from p. The result is distributed exactly as tokens drawn from p one by one.
A deterministic draft is a one-hot q; if p is one-hot too, the rule reduces to comparing tokens.

In a tree the children of a token are tried one after the other, each against the residual that the rejections of its
siblings have left of p: SpecInfer (arXiv 2305.09781), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerskip.decoding.draft import Draft
from layerskip.decoding.sampling import draw


@dataclass(frozen=True)
class Verdict:
    """The result of verifying one draft.

    Args:
        drafted: the drafted tokens.
        accepted: how many of them the target accepted: the first ones of a chain, or those on ``path`` of a tree.
        next_token: the target's own token after the accepted ones.
        last: ``[1]`` int64 on the device: ``next_token``, ready for the next pass without a transfer.
        path: the indices in ``drafted`` of the accepted tokens of a tree, each a child of the one before; None for a chain.
    """

    drafted: tuple[int, ...]
    accepted: int
    next_token: int
    last: Tensor = field(compare=False, repr=False)
    path: tuple[int, ...] | None = None

    @property
    def committed(self) -> list[int]:
        """The accepted tokens and the target's own token after them."""
        accepted = self.drafted[: self.accepted] if self.path is None else [self.drafted[node] for node in self.path]
        return [*accepted, self.next_token]


def verify(draft: Draft, target_probs: Tensor, generator: torch.Generator | None = None) -> Verdict:
    """Accept the first tokens of a chain, or a branch of a tree from its root, and add one token.

    The host waits for the device once; for a tree of drawn tokens, once more for every node that is tried.

    Args:
        draft: K tokens, with their distributions ``[K, V]`` float32, or None if deterministic.
        target_probs: ``[K + 1, V]`` float32 rows that sum to 1, or ``[K + 1]`` int64 if each row is one-hot. Row 0 is the
            target's distribution after the sequence, row i + 1 that after drafted token i and its ancestors, warped as the
            draft's distributions were.
        generator: the source of randomness.

    Returns:
        The verdict; its ``committed`` tokens are distributed as the target's own.
    """
    if draft.parents is not None:
        return _verify_tree(draft, draft.parents, target_probs, generator)
    size = draft.tokens.shape[0]
    if target_probs.dtype == torch.int64:
        tokens = torch.cat((draft.tokens, target_probs)).tolist()  # compared on the host: every kernel costs host time
        drafted, expected = tokens[:size], tokens[size:]
        count = next((i for i in range(size) if drafted[i] != expected[i]), size)
        return Verdict(tuple(drafted), count, expected[count], target_probs[count, None])
    accepted, next_token = _sample(draft, target_probs, generator)
    *drafted, count, token = torch.cat((draft.tokens, accepted, next_token)).tolist()
    return Verdict(tuple(drafted), count, token, next_token)


def _verify_tree(draft: Draft, parents: tuple[int, ...], target_probs: Tensor, generator: torch.Generator | None) -> Verdict:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    if target_probs.dtype != torch.int64:
        if draft.probs is not None:
            return _verify_drawn_tree(draft.tokens, draft.probs, children, target_probs, generator)
        # A deterministic token is accepted with probability p, which is how often a draw from p gives that token.
        target_probs = draw(target_probs, generator)
    tokens = torch.cat((draft.tokens, target_probs)).tolist()
    drafted, expected = tokens[: len(parents)], tokens[len(parents) :]
    path: list[int] = []
    row = 0
    while (child := next((c for c in children.get(row - 1, []) if drafted[c] == expected[row]), None)) is not None:
        path.append(child)
        row = child + 1
    return Verdict(tuple(drafted), len(path), expected[row], target_probs[row, None], tuple(path))


def _verify_drawn_tree(
    tokens: Tensor,
    draft_probs: Tensor,
    children: Mapping[int, Sequence[int]],
    target_probs: Tensor,
    generator: torch.Generator | None,
) -> Verdict:
    drafted = tokens.tolist()
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        remaining = target_probs[node + 1]
        for child in children.get(node, []):
            token, row = drafted[child], draft_probs[child]
            uniform = torch.rand((), device=remaining.device, generator=generator)
            if bool(uniform * row[token] < remaining[token]):  # strict, as for a chain
                path.append(child)
                break
            residual = (remaining - row).clamp_min(0.0)
            total = residual.sum()
            remaining = torch.where(total > 0, residual / total, remaining)
        else:
            last = draw(remaining[None], generator)
            return Verdict(tuple(drafted), len(path), int(last), last, tuple(path))


def _sample(draft: Draft, target_probs: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    size, vocabulary = draft.tokens.shape[0], target_probs.shape[1]
    chosen = draft.tokens[:, None]
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
    row = target_probs.index_select(0, accepted)
    residual = (row - q_row).clamp_min_(0.0)
    # p - q can vanish by rounding if p is close to q; the residual is then p itself.
    weights = torch.where(residual.sum(1, keepdim=True) > 0, residual, row)
    return accepted, draw(weights, generator)

"""The exact acceptance rule: it decides which drafted tokens the target accepts, and which token comes next.

A pure function of distributions: Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192), algorithm 1.
A drafted token x is accepted with probability min(1, p(x) / q(x)); after the first rejection a token is drawn from
max(0, p - q), and after a fully accepted block from p. The result is distributed exactly as tokens drawn from p one by one.
A deterministic draft is a one-hot q; if p is one-hot too, the rule reduces to comparing tokens.

In a tree the children of a token are tried one after the other, each against the residual that the rejections of its
siblings have left of p: SpecInfer (arXiv 2305.09781), algorithm 2.
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
    """The result of verifying one draft.

    Args:
        drafted: the drafted tokens.
        accepted: how many of them the target accepted: the first ones of a chain, or those on ``path`` of a tree.
        next_token: the target's own token after the accepted ones.
        last: ``[1]`` int64 on the device: ``next_token``, ready for the next pass without a transfer.
        path: the indices in ``drafted`` of the accepted tokens of a tree, each a child of the one before; None for a chain.
        parents: of the drafted tokens of a tree; None for a chain, and for a tree of one branch whose shape was read late.
        late: the values of the tensors that were read with it.
    """

    drafted: tuple[int, ...]
    accepted: int
    next_token: int
    last: Tensor = field(compare=False, repr=False)
    path: tuple[int, ...] | None = None
    parents: tuple[int, ...] | None = None
    late: Sequence[list[Any]] = field(default=(), compare=False, repr=False)

    @property
    def committed(self) -> list[int]:
        """The accepted tokens and the target's own token after them."""
        accepted = self.drafted[: self.accepted] if self.path is None else [self.drafted[node] for node in self.path]
        return [*accepted, self.next_token]


def verify(
    draft: Draft, target_probs: Tensor, generator: torch.Generator | None = None, late: Sequence[Tensor] = ()
) -> Verdict:
    """Accept the first tokens of a chain, or a branch of a tree from its root, and add one token.

    The host waits for the device once. For a tree of drawn tokens whose shape the host knows, it waits once more for every
    node that is tried.

    Args:
        draft: K tokens, with their distributions ``[K, V]`` float32, or None if deterministic.
        target_probs: ``[K + 1, V]`` float32 rows that sum to 1, or ``[K + 1]`` int64 if each row is one-hot. Row 0 is the
            target's distribution after the sequence, row i + 1 that after drafted token i and its ancestors, warped as the
            draft's distributions were.
        generator: the source of randomness.
        late: tensors to read in the same wait.

    Returns:
        The verdict; its ``committed`` tokens are distributed as the target's own.
    """
    if isinstance(draft.parents, DeviceTree):
        return _verify_device_tree(draft, draft.parents, target_probs, generator, late)
    if draft.parents is not None:
        return _verify_tree(draft, draft.parents, target_probs, generator, late)
    size = draft.tokens.shape[0]
    if target_probs.dtype == torch.int64:
        # Compared on the host, because every kernel costs host time.
        tokens, *values = read_to_host(torch.cat((draft.tokens, target_probs)), *late)
        drafted, expected = tokens[:size], tokens[size:]
        count = next((i for i in range(size) if drafted[i] != expected[i]), size)
        return Verdict(tuple(drafted), count, expected[count], target_probs[count, None], late=values)
    accepted, next_token = _sample(draft, target_probs, generator)
    (*drafted, count, token), *values = read_to_host(torch.cat((draft.tokens, accepted, next_token)), *late)
    return Verdict(tuple(drafted), count, token, next_token, late=values)


def _verify_tree(
    draft: Draft,
    parents: tuple[int, ...],
    target_probs: Tensor,
    generator: torch.Generator | None,
    late: Sequence[Tensor],
) -> Verdict:
    if target_probs.dtype != torch.int64:
        if draft.probs is not None:
            return _verify_drawn_tree(draft.tokens, draft.probs, parents, target_probs, generator, late)
        # A deterministic token is accepted with probability p, which is how often a draw from p gives that token.
        target_probs = draw(target_probs, generator)
    tokens, *values = read_to_host(torch.cat((draft.tokens, target_probs)), *late)
    drafted, expected = tokens[: len(parents)], tokens[len(parents) :]
    path, row = _matching_branch(drafted, parents, expected)
    return Verdict(tuple(drafted), len(path), expected[row], target_probs[row, None], path, parents, values)


def _verify_device_tree(
    draft: Draft, tree: DeviceTree, target_probs: Tensor, generator: torch.Generator | None, late: Sequence[Tensor]
) -> Verdict:
    count = draft.tokens.shape[0]
    parts = [draft.tokens, tree.parents, tree.size]
    if draft.probs is None or target_probs.dtype == torch.int64:
        following = target_probs if target_probs.dtype == torch.int64 else draw(target_probs, generator)
        parts.append(following)
    else:
        chosen, following = _accept_drawn(draft.tokens, draft.probs, tree, target_probs, generator)
        parts += [following, chosen]
    read, *values = read_to_host(torch.cat(parts), *late)
    size = read[2 * count]
    drafted, parents = read[:size], tuple(read[count : count + size])
    expected, choices = read[2 * count + 1 : 3 * count + 2], read[3 * count + 2 :]
    if choices:
        nodes, row = list[int](), 0
        while choices[row] >= 0:
            nodes.append(choices[row])
            row = nodes[-1] + 1
        path = tuple(nodes)
    else:
        path, row = _matching_branch(drafted, parents, expected)
    return Verdict(tuple(drafted), len(path), expected[row], following[row, None], path, chain_or_tree(parents), values)


def _matching_branch(drafted: Sequence[int], parents: Sequence[int], expected: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the nodes of the branch that the target's tokens take, and the row after the last of them."""
    children = _children(parents)
    path: list[int] = []
    row = 0
    while (child := next((c for c in children.get(row - 1, ()) if drafted[c] == expected[row]), None)) is not None:
        path.append(child)
        row = child + 1
    return tuple(path), row


def _children(parents: Sequence[int]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    return children


def _verify_drawn_tree(
    tokens: Tensor,
    draft_probs: Tensor,
    parents: tuple[int, ...],
    target_probs: Tensor,
    generator: torch.Generator | None,
    late: Sequence[Tensor],
) -> Verdict:
    """Try one token after the other on the host; on a CPU this is faster, as most tokens are not tried."""
    drafted, *values = read_to_host(tokens, *late)
    children = _children(parents)
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
            return Verdict(tuple(drafted), len(path), int(last), last, tuple(path), parents, values)


def _accept_drawn(
    tokens: Tensor, draft_probs: Tensor, tree: DeviceTree, target_probs: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Decide for every row of the target which child of its token is accepted if it is reached, and which token follows.

    All rows try their first child at once, then their second, and so on.

    Returns:
        ``[K + 1]`` int64: the accepted child of each row's token, -1 for none; ``[K + 1]`` int64: a token drawn from what
        the rejections have left of each row.
    """
    count = tokens.shape[0]
    node = torch.arange(count, device=tokens.device)
    counts, above = node < tree.size, tree.parents + 1
    rank = (above[:, None] == above).tril(-1).sum(1)  # the number of earlier siblings
    uniform = torch.rand(count, device=tokens.device, generator=generator)
    remaining, chosen = target_probs, above.new_full((count + 1,), -1)
    for place in range(tree.width):
        # The child of this rank of every row. Other nodes are written to a further row, which is dropped.
        into = torch.where(counts & (rank == place), above, count + 1)
        child = above.new_full((count + 2,), -1).scatter_(0, into, node)[:-1]
        tried, child = (child >= 0) & (chosen < 0), child.clamp_min(0)
        q, token = draft_probs.index_select(0, child), tokens.index_select(0, child)[:, None]
        reach = uniform.index_select(0, child) * q.gather(1, token)[:, 0]
        accepted = tried & (reach < remaining.gather(1, token)[:, 0])  # strict, as for a chain
        chosen = torch.where(accepted, child, chosen)
        residual = (remaining - q).clamp_min_(0.0)
        total = residual.sum(1, keepdim=True)
        rejected = (tried & ~accepted)[:, None] & (total > 0)
        remaining = torch.where(rejected, residual / total, remaining)
    return chosen, draw(remaining, generator)


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

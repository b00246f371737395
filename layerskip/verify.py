"""Which drafted tokens does the target accept, and which token comes next?

A pure rule on distributions: Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192), algorithm 1. A
drafted token x is accepted with probability min(1, p(x) / q(x)); the first rejection draws from max(0, p - q), and a block
accepted whole draws one more token from p. The result is distributed exactly as tokens drawn from p one by one. A
deterministic draft is a one-hot q; where p is one-hot too, the rule reduces to comparing tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .draft import Draft
from .sampling import draw


@dataclass(frozen=True)
class Verdict:
    """What came of one draft.

    Args:
        drafted: the drafted tokens.
        accepted: how many of them, from the first, the target accepted.
        next_token: the target's own token behind the accepted ones.
        last: ``[1]`` int64 on the device: ``next_token``, to be fed without a transfer.
    """

    drafted: tuple[int, ...]
    accepted: int
    next_token: int
    last: Tensor = field(compare=False, repr=False)


def verify(draft: Draft, target_probs: Tensor, generator: torch.Generator | None = None) -> Verdict:
    """Accept a prefix of the draft and add one token. The host waits for the device once, in here.

    Args:
        draft: K tokens in a chain, with their distributions ``[K, V]`` float32 or None where deterministic.
        target_probs: ``[K + 1, V]`` float32 rows that sum to 1, or ``[K + 1]`` int64 where each row is one-hot; row i is
            the target's distribution behind i drafted tokens, warped as the draft's was.
        generator: the source of randomness.

    Returns:
        The verdict; ``drafted[:accepted] + (next_token,)`` is distributed as tokens of the target.
    """
    size = draft.tokens.shape[0]
    if target_probs.dtype == torch.int64:
        accepted = (draft.tokens == target_probs[:size]).cumprod(0).sum(0, keepdim=True)
        next_token = target_probs.index_select(0, accepted)
    else:
        accepted, next_token = _sample(draft, target_probs, generator)
    *drafted, count, token = torch.cat((draft.tokens, accepted, next_token)).tolist()
    return Verdict(tuple(drafted), count, token, next_token)


def _sample(draft: Draft, target_probs: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    size, vocabulary = draft.tokens.shape[0], target_probs.shape[1]
    chosen = draft.tokens[:, None]
    draft_probs = draft.probs
    if draft_probs is None:
        draft_probs = target_probs.new_zeros(size, vocabulary).scatter_(1, chosen, 1.0)
    p = target_probs[:size].gather(1, chosen)[:, 0]
    q = draft_probs.gather(1, chosen)[:, 0]
    # u * q < p is u < p / q without the division; strict, so that p = 0 is never accepted at u = 0.
    uniform = torch.rand(size, device=p.device, generator=generator)
    accepted = (uniform * q < p).cumprod(0).sum(0, keepdim=True)
    # A row of zeros behind the draft's makes the bonus token a residual like any other.
    against = torch.cat((draft_probs, draft_probs.new_zeros(1, vocabulary))).index_select(0, accepted)
    row = target_probs.index_select(0, accepted)
    residual = (row - against).clamp_min_(0.0)
    # p - q can vanish in rounding where p is about q; the residual is then p itself.
    weights = torch.where(residual.sum(1, keepdim=True) > 0, residual, row)
    return accepted, draw(weights, generator)

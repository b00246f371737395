"""Where a draft is unsure, what else might it have said? Siblings beside the tokens of a chain.

SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration (arXiv 2410.06916), section 4.3: every token of
the chain has its runners-up verified beside it, more of them where the draft is less sure. How many depends on the draft's
distribution alone; where tokens are drawn, siblings are drawn from its likely ones, without those before them, as recursive
rejection over siblings wants it (SpecInfer, arXiv 2305.09781).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from layerskip.decoding.draft import Draft
from layerskip.decoding.sampling import Chooser, draw, widen
from layerskip.decoding.stopping import portions
from layerskip.device.upload import upload


class Fan:
    """Collects the siblings of one chain while it is drafted.

    Args:
        siblings: the most of them beside a token, at least 1.
        least_probability: tokens that the draft thinks less likely are none.
        chooser: the decoding's.
        drafted: ``[v]`` int64, the tokens that the chain is drafted from; None for all.
    """

    def __init__(self, siblings: int, least_probability: float, chooser: Chooser, drafted: Tensor | None = None) -> None:
        self.siblings, self.least_probability, self.chooser = siblings, least_probability, chooser
        self._drafted = drafted
        self._places: list[Tensor] = []  # [siblings] each, among those tokens
        self._widths: list[Tensor] = []  # [1] each
        self._rows: list[Tensor] = []  # [siblings, v] each, where tokens are drawn

    def see(self, logits: Tensor, block: Tensor, distribution: Tensor, chosen: Tensor) -> None:
        """Find the siblings of a token, without waiting for the device.

        Args:
            logits: ``[1, v]`` behind the block.
            block: as :meth:`Chooser.distribution` takes it.
            distribution: what the chooser made of them.
            chosen: ``[1]`` int64, the token's place.
        """
        if self.chooser.sampling.greedy:
            scores = self.chooser.penalise(logits, block, self._drafted)
            chances, others = runners_up(scores, chosen, self.siblings)
            self._widths.append(((chances >= self.least_probability) & (chances > 0)).sum(1))
            self._places.append(others[0])
            return
        probs = distribution[0]
        likely = (probs >= self.least_probability) & (probs > 0)
        self._widths.append((likely.sum() - 1).clamp(0, self.siblings)[None])
        left = torch.where(likely, probs, 0.0).index_fill(0, chosen, 0.0)
        places, rows = [], []
        for _ in range(self.siblings):
            total = left.sum()
            rows.append(torch.where(total > 0, left / total, probs))  # the latter beyond the width only
            places.append(draw(rows[-1], self.chooser.generator)[None])
            left = left.index_fill(0, places[-1], 0.0)
        self._places.append(torch.cat(places))
        self._rows.append(torch.stack(rows))

    def spread(self, chain: Draft) -> Draft:
        """The chain with its siblings, who come behind it; the device is waited for once."""
        size, each = chain.tokens.shape[0], self._places[0].shape[0]
        widths = torch.cat(self._widths).tolist()
        wanted = [(place, rank) for place in range(size) for rank in range(min(widths[place], each))]
        if not wanted:
            return chain
        chosen = upload([place * each + rank for place, rank in wanted], chain.tokens.device)
        others = torch.cat(self._places).index_select(0, chosen)
        tokens = torch.cat((chain.tokens, others if self._drafted is None else self._drafted.index_select(0, others)))
        parents = tuple(itertools.chain(range(-1, size - 1), (place - 1 for place, _ in wanted)))
        probs = None
        if chain.probs is not None:
            rows = torch.cat(self._rows).index_select(0, chosen)
            rows = rows if self._drafted is None else widen(rows, self._drafted, self.chooser.vocabulary)
            probs = torch.cat((chain.probs, rows))
        return replace(chain, tokens=tokens, parents=parents, probs=probs)


def runners_up(scores: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """What else a draft might have said.

    Args:
        scores: ``[n, V]`` float32 logits, penalised.
        chosen: ``[n]`` int64: what it said.
        count: of others, at most V of them.

    Returns:
        ``[n, count]`` float32 probabilities, falling, and ``[n, count]`` int64 tokens.
    """
    found = []
    for some, said in zip(portions(scores), portions(chosen), strict=True):
        others = some.scatter(1, said[:, None], -float("inf")).topk(min(count, some.shape[1]))
        found.append(((others.values - some.logsumexp(-1, keepdim=True)).exp(), others.indices))
    chances, tokens = (torch.cat(parts) for parts in zip(*found, strict=True))
    return chances, tokens

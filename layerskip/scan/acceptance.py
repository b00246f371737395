"""Would a drafted token be accepted? Judged by the target's own text, for many drafts at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from layerskip.decoding.stopping import confidence, portions
from layerskip.drafters.siblings import runners_up
from layerskip.scan.text_batch import Start, Texts


class Drafted(NamedTuple):
    """A drafted token.

    Args:
        confidence: the draft's probability of its most likely token.
        kept: the chance that the token is accepted, given that those before it were.
        likely: the probabilities of the draft's runners-up, falling.
        rank: which of them the target's token is; their number where it is none.
    """

    confidence: float
    kept: float
    likely: Sequence[float] = ()
    rank: int = 0


class Judge:
    """Judges drafts that begin somewhere in texts.

    Args:
        texts: the target's own.
        runners: so many runners-up are looked at, where the target is greedy.
    """

    def __init__(self, texts: Texts, runners: int) -> None:
        self.texts, self.sampling, self.runners = texts, texts.sampling, runners

    def __call__(self, logits: Tensor, starts: Sequence[Start], chain: Tensor, place: int) -> tuple[Tensor, list[Drafted]]:
        """The next token of every draft, and what is known of it; sampled drafts are led along the texts.

        Args:
            logits: ``[n, V]`` of the drafts.
            starts: where they began.
            chain: ``[n, place + 1]`` int64: the token at the start, and what was drafted since.
            place: of the token, from 0.
        """
        seen = None
        if self.sampling.needs_seen:
            prefixes = [self.texts.texts[p].tokens[: self.texts.begin((p, s))] for p, s in starts]
            seen = torch.cat([self.texts.seen(torch.cat(parts)) for parts in zip(prefixes, chain, strict=True)])
        ahead = [(p, s + place + 1) for p, s in starts]
        own = self.texts.tokens(ahead)
        # A few rows at a time: on a CPU, converting all logits at once takes as long as all that is asked of them.
        before = itertools.repeat(None) if seen is None else portions(seen)
        rows = zip(portions(logits), portions(own), before, strict=False)
        looks = [self._look(some.float(), said, near) for some, said, near in rows]
        sure, drafted, *beside = (torch.cat(parts) for parts in zip(*looks, strict=True))
        # Of what is not a number no draft is unsure: decoding would not stop either.
        sure = sure.nan_to_num(nan=1.0)
        if not self.sampling.greedy:
            p_own = [self.texts.chance(start) for start in ahead]
            kept = [min(1.0, q / chance) if chance > 0 else 1.0 for q, chance in zip(drafted.tolist(), p_own, strict=True)]
            return own, [Drafted(*parts) for parts in zip(sure.tolist(), kept, strict=True)]
        kept = [float(self.texts.agrees(*pair)) for pair in zip(ahead, drafted.tolist(), strict=True)]
        if not beside:
            return drafted, [Drafted(*parts) for parts in zip(sure.tolist(), kept, strict=True)]
        chances, others = beside
        ranks = [
            next((rank for rank, token in enumerate(some) if self.texts.agrees(start, token)), self.runners)
            for start, some in zip(ahead, others.tolist(), strict=True)
        ]
        return drafted, [Drafted(*parts) for parts in zip(sure.tolist(), kept, chances.tolist(), ranks, strict=True)]

    def _look(self, logits: Tensor, own: Tensor, seen: Tensor | None) -> tuple[Tensor, ...]:
        """Of a few rows ``[n, V]``: how sure a draft is, its tokens, and the probabilities of runners-up and these, if any.

        Where tokens are sampled: how sure it is, and its probability of the text's own tokens.
        """
        sure, found = confidence(logits), self.sampling.distribution(logits, seen)
        if not self.sampling.greedy:
            return sure, found.gather(1, own[:, None])[:, 0]
        if not self.runners:
            return sure, found
        return sure, found, *runners_up(self.sampling.penalise(logits, seen), found, self.runners)

"""The acceptance test of a scan: it compares the drafts of one pass with the target's own texts, many drafts at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerskip.decoding.stopping import confidence, portions
from layerskip.drafters.siblings import runners_up
from layerskip.scan.text_batch import Start, TextBatch


class DraftedToken(NamedTuple):
    """A drafted token with its acceptance.

    Args:
        confidence: the draft's probability of its most likely token.
        acceptance: the probability that the token is accepted, given that those before it were.
        runner_probs: the probabilities of the draft's runners-up, descending.
        rank: which runner-up is the target's token; their number for none.
    """

    confidence: float
    acceptance: float
    runner_probs: Sequence[float] = ()
    rank: int = 0


class AcceptanceTest:
    """The acceptance of drafts that start at positions of texts.

    For a greedy target, ``runners`` runners-up are recorded.
    """

    def __init__(self, texts: TextBatch, runners: int) -> None:
        self.texts, self.sampling, self.runners = texts, texts.sampling, runners

    def __call__(
        self, logits: Tensor, starts: Sequence[Start], chain: Tensor, place: int
    ) -> tuple[Tensor, list[DraftedToken]]:
        """Choose the next token of every draft and compute its acceptance.

        Sampled drafts continue with the texts' own tokens.

        Args:
            logits: ``[n, V]`` of the drafts.
            starts: their start positions.
            chain: ``[n, place + 1]`` int64: the token at the start, then the drafted ones.
            place: index of the next drafted token, from 0.
        """
        seen = None
        if self.sampling.needs_seen:
            prefixes = [self.texts.texts[p].tokens[: self.texts.position((p, s))] for p, s in starts]
            seen = torch.cat([self.texts.seen(torch.cat(parts)) for parts in zip(prefixes, chain, strict=True)])
        ahead = [(p, s + place + 1) for p, s in starts]
        text_tokens = self.texts.tokens(ahead)
        # A few rows at a time: on a CPU, converting all logits to float32 takes as long as everything computed from them.
        seen_rows = itertools.repeat(None) if seen is None else portions(seen)
        rows = zip(portions(logits), portions(text_tokens), seen_rows, strict=False)
        results = [self._score(some.float(), own, before) for some, own, before in rows]
        confidences, scored, *runner_up_rows = (torch.cat(parts) for parts in zip(*results, strict=True))
        # NaN stops no draft, in decoding either.
        confidences = confidences.nan_to_num(nan=1.0)
        if self.sampling.greedy:
            accepted = [float(self.texts.agrees(*pair)) for pair in zip(ahead, scored.tolist(), strict=True)]
        else:
            target_probs = [self.texts.token_prob(start) for start in ahead]
            accepted = [min(1.0, q / p) if p > 0 else 1.0 for q, p in zip(scored.tolist(), target_probs, strict=True)]
        columns: list[list[Any]] = [confidences.tolist(), accepted]
        if runner_up_rows:
            probs, tokens = runner_up_rows
            ranks = [
                next((rank for rank, token in enumerate(some) if self.texts.agrees(start, token)), self.runners)
                for start, some in zip(ahead, tokens.tolist(), strict=True)
            ]
            columns += [probs.tolist(), ranks]
        drafted = scored if self.sampling.greedy else text_tokens
        return drafted, [DraftedToken(*values) for values in zip(*columns, strict=True)]

    def _score(self, logits: Tensor, text_tokens: Tensor, seen: Tensor | None) -> tuple[Tensor, ...]:
        """Score a few rows ``[n, V]``.

        Returns:
            Greedy: confidences, drafted tokens, and probabilities and tokens of runners-up if there are any. Sampled:
            confidences and the draft's probabilities of the text's own tokens.
        """
        confidences, chosen = confidence(logits), self.sampling.distribution(logits, seen)
        if not self.sampling.greedy:
            return confidences, chosen.gather(1, text_tokens[:, None])[:, 0]
        if not self.runners:
            return confidences, chosen
        return confidences, chosen, *runners_up(self.sampling.penalise(logits, seen), chosen, self.runners)

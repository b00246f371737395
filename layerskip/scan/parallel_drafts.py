"""Drafts from many positions of texts at once. A scan runs one pass per drafted token, over the drafts that still matter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from layerskip.decoding.stopping import confidence, portions
from layerskip.mask import SkipMask
from layerskip.scan.text_batch import Start, StartPack, TextBatch, runs_of

Row = tuple[int, int, int]
"""Index of a mask, index of a continuation, and the start in it."""

_HOPELESS = 1e-4  # sampled texts: a start whose draft is reached with a lower probability is left out of deeper passes


class DraftedToken(NamedTuple):
    """A drafted token with its acceptance.

    Args:
        confidence: the draft's probability of its most likely token.
        acceptance: the probability that the token is accepted, given that those before it were.
    """

    confidence: float
    acceptance: float


class ParallelDrafts:
    """A drafter from many starts of texts at once."""

    def __init__(self, texts: TextBatch) -> None:
        self.texts, self.sampling = texts, texts.sampling

    def draft(
        self, pack: StartPack, masks: Sequence[SkipMask], rows: list[Row], depth: int, floor: float | None
    ) -> Iterator[tuple[Row, int, DraftedToken]]:
        """Draft from starts of a pack.

        A draft continues while it agrees with the text, and while its confidence is at least ``floor``.

        Args:
            rows: the drafts, at least one for every mask.
            floor: the confidence that keeps a draft going; None for none.

        Yields:
            The row, the place in its draft from 0, and the drafted token.
        """
        model, texts, cache = self.texts.model, self.texts.continuations, self.texts.load(pack)
        chain = self.texts.tokens([(p, s) for _, p, s in rows])[:, None]
        draft_ids = torch.arange(len(rows), device=chain.device)
        reach = np.ones(len(rows))
        passes: list[tuple[Tensor, int]] = []  # draft ids of the rows, and their distance from the start
        try:
            for place in range(depth):
                here = draft_ids.tolist()
                if not here:
                    break
                live = [rows[i] for i in here]
                starts = [(p, s) for _, p, s in live]
                visible, positions = self.texts.visible(pack, starts, draft_ids, passes, place)
                mask_ids = torch.tensor([m for m, _, _ in live], device=chain.device)
                parts = runs_of([p for p, _ in starts])
                model.prepare(visible, masks, mask_ids, parts)
                logits = model.run(chain[:, -1], positions, cache)
                passes.append((draft_ids, place))
                cache.length += len(live)
                drafted, results = self._accept(logits, starts, chain, place)
                for i, row, result in zip(here, live, results, strict=True):
                    reach[i] *= result.acceptance
                    yield row, place, result
                going = [
                    place + 1 < texts[p].limit(s)
                    and (
                        (floor is not None and result.confidence >= floor)
                        or (reached > _HOPELESS and s + place + 1 < texts[p].starts)
                    )
                    for (p, s), result, reached in zip(starts, results, reach[here], strict=True)
                ]
                chosen = torch.tensor(going, device=chain.device)
                draft_ids = draft_ids[chosen]
                chain = torch.cat((chain, drafted[:, None]), 1)[chosen]
        finally:
            cache.length = pack.end

    def _accept(
        self, logits: Tensor, starts: Sequence[Start], chain: Tensor, place: int
    ) -> tuple[Tensor, list[DraftedToken]]:
        """Choose the next token of every draft and compute its acceptance. Sampled drafts continue with the texts' tokens.

        Args:
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
        confidences, scored = (torch.cat(parts) for parts in zip(*results, strict=True))
        sure = confidences.nan_to_num(nan=1.0).tolist()  # NaN stops no draft, in decoding either
        if self.sampling.greedy:
            accepted = [float(self.texts.agrees(start, token)) for start, token in zip(ahead, scored.tolist(), strict=True)]
            return scored, list(map(DraftedToken, sure, accepted))
        ratios = zip(scored.tolist(), map(self.texts.token_prob, ahead), strict=True)
        accepted = [min(1.0, q / p) if p > 0 else 1.0 for q, p in ratios]
        return text_tokens, list(map(DraftedToken, sure, accepted))

    def _score(self, logits: Tensor, text_tokens: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the confidences of a few rows ``[n, V]``, and the drafted tokens.

        If tokens are sampled, return the draft's probabilities of the text's own tokens instead.
        """
        confidences, chosen = confidence(logits), self.sampling.distribution(logits, seen)
        return confidences, chosen if self.sampling.greedy else chosen.gather(1, text_tokens[:, None])[:, 0]

"""Scans, which predict the decoding of a skip mask from a few passes over the target's own text, without generating any.

1. Lossless decoding outputs the target's own tokens, so its text is known before any draft is made.
2. The target reads this text once, and then drafts start from every position of it in the same pass, one row per position.
3. Each further pass drafts the next token of the drafts that agree with the text so far.
4. Given the text y, the token at place i of a draft from position s is accepted with probability
   ``a(s, i) = min(1, q(y[s+i]) / p(y[s+i]))``, where q is the draft's and p the target's distribution; for greedy decoding
   this is 1 if the draft's token is y[s+i] and 0 otherwise (arXiv 2211.17192).
5. A draft of length g from position s therefore accepts n tokens with probability ``a(s, 1) ... a(s, n) (1 - a(s, n+1))``,
   without the last factor for n = g, and commits n + 1, which gives all rounds (:mod:`layerskip.scan.replay`).

The replay is exact for greedy decoding and an expectation for sampled decoding. A stop rule may also need the confidences
of a draft after its first wrong token; a scan follows drafts for these, down to a given confidence.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from layerskip.config import StopRule
from layerskip.decoding.sampling import Sampling
from layerskip.decoding.stats import Round
from layerskip.decoding.stopping import confidence, portions
from layerskip.mask import SkipMask
from layerskip.models.target import Target
from layerskip.scan.replay import Counts, Trace, count, expected_counts, replay
from layerskip.scan.row_model import RowModel
from layerskip.scan.text_batch import Start, StartPack, TextBatch, runs_of
from layerskip.texts.continuations import Continuation

_CHECKED = 8  # starts in the self-check


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


@dataclass(frozen=True, eq=False)
class Scan:
    """The scan of one mask on all continuations.

    Args:
        traces: the drafts along each continuation.
    """

    mask: SkipMask
    traces: tuple[Trace, ...]

    @property
    def agreement(self) -> float:
        """The share of first drafted tokens that are the target's; the expected acceptance for sampled texts."""
        firsts = np.concatenate([trace.acceptance[:, 0] for trace in self.traces])
        return float(np.nanmean(firsts)) if len(firsts) else 0.0


class Scanner:
    """A scanner of masks over continuations.

    Args:
        continuations: its continuations, from :func:`~layerskip.texts.continuations.continue_prompts`.
        max_rows: rows per pass, which bounds memory: a pass holds ``[max_rows, V]`` logits, and the one cache has room for
            ``max_rows * depth`` positions after the continuations of as many starts.
        max_bytes: budget for the target's keys and values of the continuations, without that cache.
            Continuations beyond it are left out; None for no limit.

    Raises:
        UnsupportedModel: the model's sub-layers cannot be skipped, or its attention does not support independent rows.
    """

    def __init__(
        self,
        target: Target,
        continuations: Sequence[Continuation],
        sampling: Sampling,
        depth: int = 8,
        max_rows: int = 256,
        max_bytes: int | None = None,
    ) -> None:
        if depth < 1 or max_rows < 1:
            raise ValueError(f"depth, max_rows: {depth}, {max_rows} are not at least 1")
        self.target, self.sampling = target, sampling
        self.depth, self.max_rows = depth, max_rows
        model, vocabulary = RowModel(target.model), target.vocabulary
        self._texts = TextBatch(model, vocabulary, continuations, sampling, max_bytes)
        self.continuations = self._texts.continuations
        texts = enumerate(self.continuations)
        self._packs = self._pack([(p, s) for p, text in texts for s in range(text.starts) if text.limit(s) > 0])

    def sample(self, rows: int) -> Scanner:
        """Return a scanner of about ``rows`` evenly spread starts, which suffices for agreements, not for rounds."""
        starts = [row for pack in self._packs for row in pack.rows]
        sampled = copy.copy(self)
        sampled._packs = self._pack(starts[:: max(1, -(-len(starts) // rows))])
        return sampled

    def _pack(self, starts: list[Start]) -> list[StartPack]:
        parts = [starts[i : i + self.max_rows] for i in range(0, len(starts), self.max_rows)]
        return [self._texts.pack(part, max(1, self.max_rows // len(part)) * len(part) * self.depth) for part in parts]

    def check(self) -> None:
        """Raise :class:`UnsupportedModel` unless a draft that skips nothing has the target's confidences at a few starts."""
        (scan,) = self.sample(_CHECKED).scan([SkipMask.none(self.target.layers)], depth=2)
        tolerance = 1e-3 if self.target.dtype == "float32" else 0.1
        for text, trace in zip(self._texts.texts, scan.traces, strict=True):
            for place in range(trace.depth):
                found = trace.confidence[: trace.confidence.shape[0] - place, place]
                expected = text.confidence[1 + place :]
                known = ~np.isnan(found)
                if not np.allclose(found[known], expected[known], rtol=tolerance, atol=tolerance):
                    raise self._texts.model.unsupported("a draft that skips nothing differs from the model itself")

    @torch.inference_mode()
    def scan(self, masks: Sequence[SkipMask], depth: int | None = None, floor: float | None = None) -> list[Scan]:
        """Scan masks, as many at once as ``max_rows`` allows.

        Args:
            depth: the longest draft; None for the scanner's.
            floor: greedy drafts are scanned past their first wrong token while their confidence is at least this: the lowest
                threshold that will be replayed; None for none.
        """
        if not self.sampling.greedy:
            floor = None
        depth = self.depth if depth is None else min(depth, self.depth)
        scans = [Scan(mask, tuple(Trace.empty(p.starts, depth) for p in self.continuations)) for mask in masks]
        for pack in self._packs:
            at_once = max(1, self.max_rows // len(pack.rows))
            for first in range(0, len(scans), at_once):
                some = scans[first : first + at_once]
                rows = [(m, p, s) for m in range(len(some)) for p, s in pack.rows]
                for (m, p, s), place, token in self._draft(pack, [scan.mask for scan in some], rows, depth, floor):
                    trace = some[m].traces[p]
                    trace.confidence[s, place], trace.acceptance[s, place] = token
        return scans

    def _draft(
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
        model, texts, cache = self._texts.model, self._texts.continuations, self._texts.load(pack)
        chain = self._texts.tokens([(p, s) for _, p, s in rows])[:, None]
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
                visible, positions = self._texts.visible(pack, starts, draft_ids, passes, place)
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
            prefixes = [self._texts.texts[p].tokens[: self._texts.position((p, s))] for p, s in starts]
            seen = torch.cat([self._texts.seen(torch.cat(parts)) for parts in zip(prefixes, chain, strict=True)])
        ahead = [(p, s + place + 1) for p, s in starts]
        text_tokens = self._texts.tokens(ahead)
        # A few rows at a time: on a CPU, converting all logits to float32 takes as long as everything computed from them.
        seen_rows = itertools.repeat(None) if seen is None else portions(seen)
        rows = zip(portions(logits), portions(text_tokens), seen_rows, strict=False)
        results = [self._score(some.float(), own, before) for some, own, before in rows]
        confidences, scored = (torch.cat(parts) for parts in zip(*results, strict=True))
        sure = confidences.nan_to_num(nan=1.0).tolist()  # NaN stops no draft, in decoding either
        if self.sampling.greedy:
            accepted = [float(self._texts.agrees(start, token)) for start, token in zip(ahead, scored.tolist(), strict=True)]
            return scored, list(map(DraftedToken, sure, accepted))
        ratios = zip(scored.tolist(), map(self._texts.token_prob, ahead), strict=True)
        accepted = [min(1.0, q / p) if p > 0 else 1.0 for q, p in ratios]
        return text_tokens, list(map(DraftedToken, sure, accepted))

    def _score(self, logits: Tensor, text_tokens: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the confidences of a few rows ``[n, V]``, and the drafted tokens.

        If tokens are sampled, return the draft's probabilities of the text's own tokens instead.
        """
        confidences, chosen = confidence(logits), self.sampling.distribution(logits, seen)
        return confidences, chosen if self.sampling.greedy else chosen.gather(1, text_tokens[:, None])[:, 0]

    def counts(self, scan: Scan, num_speculative_tokens: int, stop: StopRule) -> list[Counts]:
        """Return the counts of decoding every continuation with a scanned mask; the errors are those of :meth:`rounds`."""
        if self.sampling.greedy:
            return [count(rounds) for rounds in self.rounds(scan, num_speculative_tokens, stop)]
        pairs = self._traced(scan, num_speculative_tokens, stop)
        return [expected_counts(continuation, trace, num_speculative_tokens, stop) for continuation, trace in pairs]

    def rounds(self, scan: Scan, num_speculative_tokens: int, stop: StopRule) -> list[list[Round]]:
        """Return the rounds of greedy decoding for every continuation.

        Raises:
            ValueError: tokens are sampled, the stop rule is adaptive, or its threshold or the draft length was not scanned.
        """
        if not self.sampling.greedy:
            raise ValueError("sampling: single rounds are known for greedy decoding only")
        pairs = self._traced(scan, num_speculative_tokens, stop)
        return [replay(continuation, trace, num_speculative_tokens, stop) for continuation, trace in pairs]

    def _traced(self, scan: Scan, num_speculative_tokens: int, stop: StopRule) -> list[tuple[Continuation, Trace]]:
        if stop.method == "adaptive":
            raise ValueError("stop: an adaptive threshold is not replayed")
        if any(trace.depth < num_speculative_tokens for trace in scan.traces):
            raise ValueError(f"num_speculative_tokens: {num_speculative_tokens} exceeds the scan's depth")
        return list(zip(self.continuations, scan.traces, strict=True))

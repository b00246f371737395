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
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layerskip.config import StopRule
from layerskip.decoding.sampling import Sampling
from layerskip.decoding.stats import Round
from layerskip.decoding.stopping import confidence, portions
from layerskip.draft_plan import DraftPlan
from layerskip.models.target import Target
from layerskip.scan.replay import Counts, Trace, count, expected_counts, replay
from layerskip.scan.row_model import RowModel
from layerskip.scan.text_batch import StartPack, TextBatch
from layerskip.texts.continuations import Continuation

_CHECKED = 8  # starts in the self-check
_HOPELESS = 1e-4  # sampled texts: a start whose draft is reached with a lower probability is left out of deeper passes


@dataclass(frozen=True, eq=False)
class Scan:
    """The scan of one mask on all continuations."""

    mask: DraftPlan
    traces: tuple[Trace, ...]  # the drafts along each continuation

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
        self.target, self.sampling = target, sampling
        self.depth, self.max_rows = depth, max_rows
        self._texts = TextBatch(RowModel(target.model), continuations, sampling, max_bytes)
        self.continuations = self._texts.continuations
        self._packs = self._pack(np.flatnonzero(self._texts.limit > 0))

    def sample(self, rows: int) -> Scanner:
        """Return a scanner of about ``rows`` evenly spread starts, which suffices for agreements, not for rounds."""
        starts = np.flatnonzero(self._texts.limit > 0)
        sampled = copy.copy(self)
        sampled._packs = self._pack(starts[:: max(1, -(-len(starts) // rows))])
        return sampled

    def _pack(self, starts: NDArray[np.int64]) -> list[StartPack]:
        parts = [starts[first : first + self.max_rows] for first in range(0, len(starts), self.max_rows)]
        return [self._texts.pack(part, max(1, self.max_rows // len(part)) * len(part) * self.depth) for part in parts]

    def check(self) -> None:
        """Raise :class:`UnsupportedModel` unless a draft that skips nothing has the target's confidences at a few starts."""
        (scan,) = self.sample(_CHECKED).scan([DraftPlan.none(self.target.layers)], depth=2)
        tolerance = 1e-3 if self.target.dtype == "float32" else 0.1
        for text, trace in zip(self._texts.texts, scan.traces, strict=True):
            for place in range(trace.depth):
                found = trace.confidence[: trace.confidence.shape[0] - place, place]
                expected = text.confidence[1 + place :]
                known = ~np.isnan(found)
                if not np.allclose(found[known], expected[known], rtol=tolerance, atol=tolerance):
                    raise self._texts.model.unsupported("a draft that skips nothing differs from the model itself")

    @torch.inference_mode()
    def scan(self, masks: Sequence[DraftPlan], depth: int | None = None, floor: float | None = None) -> list[Scan]:
        """Scan masks, as many at once as ``max_rows`` allows.

        Args:
            depth: the longest draft; None for the scanner's.
            floor: greedy drafts are scanned past their first wrong token while their confidence is at least this: the lowest
                threshold that will be replayed; None for none.
        """
        if floor is None or not self.sampling.greedy:
            floor = math.inf
        shape = len(masks), len(self._texts.text), self.depth if depth is None else min(depth, self.depth)
        confidences, acceptances = np.full(shape, np.nan), np.full(shape, np.nan)
        for pack in self._packs:
            at_once = max(1, self.max_rows // len(pack.starts))
            for _, group in itertools.groupby(range(len(masks)), lambda number: masks[number].bits):
                numbers = list(group)
                for first in range(numbers[0], numbers[-1] + 1, at_once):
                    some = slice(first, min(first + at_once, numbers[-1] + 1))
                    self._draft(pack, masks[some], confidences[some], acceptances[some], floor)
        ends = np.cumsum([each.starts for each in self.continuations])[:-1]
        found = zip(masks, confidences, acceptances, strict=True)
        return [Scan(mask, tuple(map(Trace, np.split(sure, ends), np.split(agreed, ends)))) for mask, sure, agreed in found]

    def _draft(
        self,
        pack: StartPack,
        masks: Sequence[DraftPlan],
        confidences: NDArray[np.float64],
        acceptances: NDArray[np.float64],
        floor: float,
    ) -> None:
        """Draft with every mask from the starts of a pack, and fill in what is found.

        A draft continues while it agrees with the text, and while its confidence is at least ``floor``.

        Args:
            confidences: ``[masks, S, depth]``: as in :class:`Trace`, for all starts.
            acceptances: of the same shape.
        """
        texts, model, cache = self._texts, self._texts.model, self._texts.load(pack)
        mask_of, start_of = np.repeat(np.arange(len(masks)), len(pack.starts)), np.tile(pack.starts, len(masks))
        live, reach = np.arange(len(start_of)), np.ones(len(start_of))  # the drafts that go on, by number
        chain = texts.tokens_at(start_of, 0)[:, None]
        passes: list[NDArray[np.int64]] = []
        try:
            for place in range(confidences.shape[2]):
                if not len(live):
                    break
                used, starts = mask_of[live], start_of[live]
                passes.append(live)
                visible, positions = texts.visible(pack, starts, passes)
                breaks = np.flatnonzero(np.diff(texts.text[starts])) + 1  # between rows of different texts
                parts = list(itertools.pairwise([0, *breaks.tolist(), len(live)]))
                model.prepare(visible, masks, torch.as_tensor(used, device=chain.device), parts)
                logits = model.run(chain[:, -1], positions, cache)
                cache.length += len(live)
                drafted, sure, accepted = self._accept(logits, starts, chain)
                confidences[used, starts, place], acceptances[used, starts, place] = sure, accepted
                reach[live] *= accepted
                agrees = (reach[live] > _HOPELESS) & (place + 1 < texts.left[starts])
                going = (place + 1 < texts.limit[starts]) & (agrees | (sure >= floor))
                chain = torch.cat((chain, drafted[:, None]), 1)[torch.as_tensor(going, device=chain.device)]
                live = live[going]
        finally:
            cache.length = pack.end

    def _accept(
        self, logits: Tensor, starts: NDArray[np.int64], chain: Tensor
    ) -> tuple[Tensor, NDArray[np.float64], NDArray[np.float64]]:
        """Choose the next token of every draft; return it, its confidence and its acceptance.

        Sampled drafts continue with the texts' tokens.

        Args:
            chain: ``[n, place]`` int64: the token at the start, then the drafted ones.
        """
        texts, place = self._texts, chain.shape[1]
        seen = None
        if self.sampling.needs_seen:
            seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, chain, True)
            for row, p, end in zip(seen, texts.text[starts], texts.begin[starts], strict=True):
                row[texts.texts[p].tokens[:end]] = True
        text_tokens = texts.tokens_at(starts, place)
        # A few rows at a time: on a CPU, converting all logits to float32 takes as long as everything computed from them.
        seen_rows = itertools.repeat(None) if seen is None else portions(seen)
        confidences, scores = [], []  # scores: the draft's tokens or, if sampled, its probabilities of the texts' tokens
        for part, own, before in zip(portions(logits), portions(text_tokens), seen_rows, strict=False):
            rows = part.float()
            chosen = self.sampling.distribution(rows, before)
            scores.append(chosen if self.sampling.greedy else chosen.gather(1, own[:, None])[:, 0])
            confidences.append(confidence(rows))
        scored = torch.cat(scores)
        sure = torch.cat(confidences).nan_to_num(nan=1.0).double().cpu().numpy()  # NaN stops no draft, in decoding either
        if self.sampling.greedy:
            agrees = (scored == text_tokens).cpu().numpy() & (place <= texts.left[starts])
            return scored, sure, agrees.astype(np.float64)
        q = scored.nan_to_num(nan=0.0).double().cpu().numpy()  # verification rejects a token of NaN
        p = texts.token_probs[texts.text[starts], texts.place[starts] + place]
        return text_tokens, sure, np.minimum(1.0, np.divide(q, p, out=np.ones_like(q), where=p > 0))

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

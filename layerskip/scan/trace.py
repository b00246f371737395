"""The record that a scan keeps of one mask's drafts along one continuation; replays read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Branching:
    """Siblings of the tokens of a chain, with the meaning of the same fields in ``SpeculativeConfig``.

    Args:
        siblings: the most siblings of one token; 0 for chains.
        min_token_prob: the draft's probability below which a runner-up is no sibling.
    """

    siblings: int = 0
    min_token_prob: float = 0.05


CHAIN = Branching()


@dataclass(frozen=True, eq=False)
class Trace:
    """The drafts of one mask from every position of a continuation.

    Args:
        agreed: ``[S]`` int64: length of the drafted prefix that equals the continuation, up to the scan's depth.
        confidence: ``[S, depth]`` float64: the draft's probability of its most likely token; NaN where not computed.
        acceptance: ``[S, depth]`` float64: the probability that a drafted token is accepted, given that those before it were
            and that the continuation is the output; 1 or 0 for greedy decoding.
        runner_probs: ``[S, depth, K]`` float64: the probabilities of the draft's K runners-up, descending; NaN where not
            computed.
        rank: ``[S, depth]`` int64: which runner-up is the continuation's token; K for none, or where not computed.
    """

    agreed: NDArray[np.int64]
    confidence: NDArray[np.float64]
    acceptance: NDArray[np.float64]
    runner_probs: NDArray[np.float64]
    rank: NDArray[np.int64]
    _lists: dict[Branching | None, list[Any]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def empty(cls, starts: int, depth: int, runners: int = 0) -> Trace:
        """Return a trace with nothing recorded."""
        unknown = np.full((starts, depth), np.nan)
        runner_probs, rank = np.full((starts, depth, runners), np.nan), np.full((starts, depth), runners)
        return cls(np.zeros(starts, dtype=np.int64), unknown, unknown.copy(), runner_probs, rank)

    @property
    def depth(self) -> int:
        """The longest recorded draft."""
        return int(self.confidence.shape[1])

    def record_confidence(self, start: int, place: int, confidence: float, runner_probs: Sequence[float]) -> None:
        """Record the draft's confidence in a token, and the probabilities of its runners-up.

        Args:
            start: the draft's start.
            place: the token's place in the draft, from 0.
            confidence: the draft's probability of the token.
            runner_probs: the K probabilities of its runners-up, descending.
        """
        self.confidence[start, place], self.runner_probs[start, place] = confidence, runner_probs
        self._lists.clear()

    def record_acceptance(self, start: int, place: int, acceptance: float, rank: int) -> None:
        """Record the acceptance of a drafted token.

        Args:
            start: the draft's start.
            place: the token's place in the draft, from 0.
            acceptance: the probability that the token is accepted.
            rank: index of the runner-up that is the text's token; K for none.
        """
        self.acceptance[start, place], self.rank[start, place] = acceptance, rank
        self.agreed[start] += acceptance == 1.0 and self.agreed[start] == place
        self._lists.clear()

    def as_lists(self) -> list[Any]:
        """Return ``agreed``, ``confidence`` and ``rank`` as lists, whose items are faster to access."""
        if None not in self._lists:
            self._lists[None] = [self.agreed.tolist(), self.confidence.tolist(), self.rank.tolist()]
        return self._lists[None]

    def total_siblings(self, branching: Branching) -> list[Any]:
        """Return ``[S, depth + 1]`` as lists: at g, the siblings of the first g drafted tokens together."""
        if branching not in self._lists:
            self._lists[branching] = np.pad(self.siblings(branching).cumsum(1), ((0, 0), (1, 0))).tolist()
        return self._lists[branching]

    def siblings(self, branching: Branching) -> NDArray[np.int64]:
        """Return ``[S, depth]``: the number of siblings of every drafted token; the mean where not computed."""
        if branching.siblings > self.runner_probs.shape[2]:
            raise ValueError(f"siblings: {branching.siblings} per token, but {self.runner_probs.shape[2]} were scanned")
        probs = self.runner_probs[:, :, : branching.siblings]
        counts: NDArray[np.int64] = (probs >= branching.min_token_prob).sum(-1)
        unknown = np.isnan(probs).any(-1)
        counts[unknown] = round(float(counts[~unknown].mean())) if not unknown.all() else 0
        return counts

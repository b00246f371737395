"""What does the draft of one mask do from every position of a continuation? As much as passes over it have seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Branching:
    """Siblings beside the tokens of a chain, as :class:`~layerskip.config.SpeculativeConfig` has them.

    Args:
        siblings: the most of them beside a token; 0 for chains.
        least_probability: that the draft must give to each.
    """

    siblings: int = 0
    least_probability: float = 0.05


CHAIN = Branching()


@dataclass(frozen=True, eq=False)
class Trace:
    """What the draft of one mask does from every position of a continuation.

    Args:
        agreed: ``[S]`` int64: how many drafted tokens in a row are the continuation's; counted up to the scan's depth.
        confidence: ``[S, depth]`` float64: the draft's probability of its most likely token; NaN where nobody looked.
        kept: ``[S, depth]`` float64: the chance that a drafted token is accepted, given that those before it were and that
            the continuation comes out; 1 or 0 for greedy decoding.
        likely: ``[S, depth, K]`` float64: the probabilities of the draft's K runners-up, falling; NaN where nobody looked.
        rank: ``[S, depth]`` int64: which of them the continuation's token is; K where it is none, or nobody looked.
    """

    agreed: NDArray[np.int64]
    confidence: NDArray[np.float64]
    kept: NDArray[np.float64]
    likely: NDArray[np.float64]
    rank: NDArray[np.int64]
    _lists: dict[Branching | None, list[Any]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def empty(cls, starts: int, depth: int, runners: int = 0) -> Trace:
        """One that nobody looked at."""
        unknown = np.full((starts, depth), np.nan)
        likely, rank = np.full((starts, depth, runners), np.nan), np.full((starts, depth), runners)
        return cls(np.zeros(starts, dtype=np.int64), unknown, unknown.copy(), likely, rank)

    @property
    def depth(self) -> int:
        """The longest draft that was looked at."""
        return int(self.confidence.shape[1])

    def saw(self, start: int, place: int, confidence: float, likely: Sequence[float]) -> None:
        """Note how sure the draft was of a token, and of its runners-up."""
        self.confidence[start, place], self.likely[start, place] = confidence, likely
        self._lists.clear()

    def judged(self, start: int, place: int, kept: float, rank: int) -> None:
        """Note what becomes of a drafted token."""
        self.kept[start, place], self.rank[start, place] = kept, rank
        self.agreed[start] += kept == 1.0 and self.agreed[start] == place
        self._lists.clear()

    def lists(self) -> list[Any]:
        """Runs of agreement, confidences and ranks as lists, single values of which are several times faster to look at."""
        if None not in self._lists:
            self._lists[None] = [self.agreed.tolist(), self.confidence.tolist(), self.rank.tolist()]
        return self._lists[None]

    def beside(self, branching: Branching) -> list[Any]:
        """``[S, depth + 1]`` as lists: siblings of so many drafted tokens."""
        if branching not in self._lists:
            self._lists[branching] = np.pad(self.widths(branching).cumsum(1), ((0, 0), (1, 0))).tolist()
        return self._lists[branching]

    def widths(self, branching: Branching) -> NDArray[np.int64]:
        """``[S, depth]``: siblings of every drafted token.

        Raises:
            ValueError: more of them than runners-up were looked at.
        """
        if branching.siblings > self.likely.shape[2]:
            raise ValueError(f"siblings: {branching.siblings} beside a token; {self.likely.shape[2]} were looked at")
        some = self.likely[:, :, : branching.siblings]
        found: NDArray[np.int64] = (some >= branching.least_probability).sum(-1)
        unknown = np.isnan(some).any(-1)
        found[unknown] = round(float(found[~unknown].mean())) if not unknown.all() else 0
        return found

"""Counts of one decoding: its rounds, and the ratios made of them. No torch in here.

Names follow Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192): a round drafts some tokens, and
the target accepts a prefix of them, or a branch of a tree, and adds one token of its own, the bonus token. The histogram and
the conditional rate follow ``metrics/acceptance_rate.py`` of NVIDIA's specdec_bench, part of Model-Optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """One draft-and-verify step."""

    drafted: int  # tokens that the drafter proposed and the target scored
    accepted: int  # those of them that were accepted
    committed: int  # tokens that were added to the output: ``accepted + 1``, fewer if the output ended among them
    depth: int | None = None  # of a tree, the number of tokens of its longest branch; None for a chain

    @property
    def longest(self) -> int:
        """The most tokens that could have been accepted."""
        return self.drafted if self.depth is None else self.depth


@dataclass(frozen=True)
class DecodeStats:
    """The rounds of one decoding, or of several joined with :meth:`join`. The first token, from the prefill, is no round."""

    rounds: tuple[Round, ...] = ()

    @classmethod
    def join(cls, parts: Iterable[DecodeStats]) -> DecodeStats:
        return cls(tuple(r for part in parts for r in part.rounds))

    @property
    def drafted(self) -> int:
        return sum(r.drafted for r in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(r.accepted for r in self.rounds)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0.0 if nothing was drafted."""
        return self.accepted / max(1, self.drafted)

    @property
    def mean_acceptance_length(self) -> float:
        """Mean committed tokens per round, with the bonus token; 0.0 without rounds."""
        return sum(r.committed for r in self.rounds) / max(1, len(self.rounds))

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Entry i: the share of rounds that accepted an i-th token in a row (from 0), among the rounds that drafted one."""
        longest = max((r.longest for r in self.rounds), default=0)
        reached = [[r.accepted > position for r in self.rounds if r.longest > position] for position in range(longest)]
        return tuple(sum(accepted) / len(accepted) for accepted in reached)

    @property
    def acceptance_length_histogram(self) -> dict[int, int]:
        """The number of rounds for each number of committed tokens, the bonus token included."""
        return dict(sorted(Counter(r.committed for r in self.rounds).items()))

    @property
    def conditional_acceptance_rate(self) -> dict[int, float]:
        """Entry n: the share of rounds that committed at least n tokens, among those that committed at least n - 1.

        It is 1.0 for n = 1, the token that every round commits. Rounds whose draft was too short count as misses.
        """
        longest = max((r.committed for r in self.rounds), default=0)
        at_least = [sum(r.committed >= n for r in self.rounds) for n in range(longest + 1)]
        return {n: at_least[n] / at_least[n - 1] for n in range(1, longest + 1)}

"""What did a decoding do, counted? Rounds, and the ratios made of them.

Names follow Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192): a round drafts some
tokens, the target accepts a prefix of them, or a branch of a tree, and adds one token of its own (the bonus token). No torch
in here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """One draft-and-verify step.

    Args:
        drafted: tokens that the drafter proposed and the target scored.
        accepted: how many of them were accepted; at most ``drafted``.
        committed: tokens that went into the output: ``accepted + 1``, less where the output ended inside.
        depth: of a tree, how many tokens its longest branch has; None for a chain, which is as long as it has tokens.
    """

    drafted: int
    accepted: int
    committed: int
    depth: int | None = None

    @property
    def longest(self) -> int:
        """The most tokens that could have been accepted."""
        return self.drafted if self.depth is None else self.depth


@dataclass(frozen=True)
class DecodeStats:
    """The rounds of one decoding, or of several joined with :meth:`join`. The prefill's first token is no round."""

    rounds: tuple[Round, ...] = ()

    @classmethod
    def join(cls, parts: Iterable[DecodeStats]) -> DecodeStats:
        """All rounds of several decodings as one."""
        return cls(tuple(r for part in parts for r in part.rounds))

    @property
    def drafted(self) -> int:
        """Tokens drafted in all rounds."""
        return sum(r.drafted for r in self.rounds)

    @property
    def accepted(self) -> int:
        """Drafted tokens accepted in all rounds."""
        return sum(r.accepted for r in self.rounds)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0.0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def accepted_per_round(self) -> float:
        """Mean accepted tokens per round, without the bonus token; 0.0 without rounds."""
        return self.accepted / len(self.rounds) if self.rounds else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Mean committed tokens per round, with the bonus token; 0.0 without rounds."""
        return sum(r.committed for r in self.rounds) / len(self.rounds) if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Entry i: of the rounds that drafted an i-th token in a row (from 0), the share that accepted one there."""
        longest = max((r.longest for r in self.rounds), default=0)
        rates = []
        for position in range(longest):
            reached = [r for r in self.rounds if r.longest > position]
            rates.append(sum(r.accepted > position for r in reached) / len(reached))
        return tuple(rates)

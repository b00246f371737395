"""What would the real decoder have done? Its rounds, counted from what a scan knows of one continuation.

Lossless decoding gives the target's own tokens, so a drafted token is accepted exactly as long as the draft agrees with the
continuation. The run of agreement from every position, and how sure the draft was of each token, therefore decide every round for
every draft length and stop rule: greedy decoding is replayed exactly. Where tokens are sampled, a token of the continuation is
accepted with probability min(1, q / p), given that the continuation is what came out (arXiv 2211.17192, theorem 3.5 read
backwards), so the rounds are a Markov chain over its positions and their expected counts follow without drawing anything.

Greedy drafts may have siblings (:mod:`layerskip.drafters.siblings`): the continuation's token at the first wrong place may be one of
them. How many siblings stand behind that place, where nobody looked, is taken to be as elsewhere; all they change is what a
round verifies.

What a prompt lookup drafts depends on the text alone, so its rounds are known without any scan; where tokens are sampled
too, since, given the continuation, a token drafted for certain is accepted exactly if it is the continuation's.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from layerskip.config import StopRule
from layerskip.decoding.stats import Round
from layerskip.decoding.stopping import Stopper
from layerskip.drafters.prompt_lookup import PromptLookup
from layerskip.scan.trace import CHAIN, Branching, Trace
from layerskip.texts.continuations import Continuation


@dataclass(frozen=True)
class Counts:
    """What decoding takes, counted; expected values where tokens are sampled.

    Args:
        rounds: rounds of draft and verification.
        drafted: drafted tokens.
        accepted: accepted ones.
        tokens: tokens that the rounds committed; a plain decoder would take one pass for each.
        verified: entry g: rounds that verified g drafted tokens.
        beside: how many of the drafted tokens are siblings, for which no draft pass ran.
        trees: rounds that verified any.
    """

    rounds: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    tokens: float = 0.0
    verified: tuple[float, ...] = ()
    beside: float = 0.0
    trees: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        size = max(len(self.verified), len(other.verified))
        padded = [c.verified + (0.0,) * (size - len(c.verified)) for c in (self, other)]
        return Counts(
            self.rounds + other.rounds,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.tokens + other.tokens,
            tuple(one + another for one, another in zip(*padded, strict=True)),
            self.beside + other.beside,
            self.trees + other.trees,
        )

    def to_list(self) -> list[Any]:
        """Plain values."""
        return [self.rounds, self.drafted, self.accepted, self.tokens, list(self.verified), self.beside, self.trees]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Counts:
        """The counts that :meth:`to_list` wrote."""
        rounds, drafted, accepted, tokens, verified, *beside = values
        return cls(rounds, drafted, accepted, tokens, tuple(verified), *beside)


def replay(
    continuation: Continuation,
    trace: Trace,
    draft_length: int,
    stopper: Stopper,
    open_starts: dict[int, float],
    branching: Branching = CHAIN,
) -> list[Round]:
    """The rounds of greedy decoding; what lies behind an end of sequence counts nowhere.

    Args:
        continuation: the target's own continuation.
        trace: a scan of the mask on it.
        draft_length: at most the trace's depth.
        stopper: of the stop rule; adapts as the rounds go.
        open_starts: takes the positions whose drafts would have to be followed beyond their first wrong token, as the stop
            rule looks at those too, and how sure it wants them; while there are any, the rounds are a guess.
        branching: siblings beside the drafted tokens.
    """
    rounds = []
    agreed, sure, rank = trace.lists()
    beside = trace.beside(branching) if branching.siblings else None
    start, starts = 0, continuation.starts
    while start < starts:
        length, left = min(draft_length, continuation.limit(start)), starts - start
        drafted = _stop(sure[start], length, left == agreed[start], left, stopper)
        if drafted is None:
            open_starts[start], drafted = stopper.threshold, length
        accepted = min(agreed[start], drafted)
        if beside is None:
            rounds.append(_round(drafted, accepted, min(accepted + 1, left)))
        else:
            widths = beside[start]
            if accepted < drafted and rank[start][accepted] < widths[accepted + 1] - widths[accepted]:
                accepted += 1
            rounds.append(_round(drafted, accepted, min(accepted + 1, left), widths[drafted]))
        start += rounds[-1].committed
        if start < starts:
            stopper.observe(drafted, accepted)
    return rounds


@functools.cache  # of which there are few, and a scan is replayed hundreds of times
def _round(drafted: int, accepted: int, committed: int, beside: int = 0) -> Round:
    """A round, as the decoder counts it."""
    if committed > accepted:
        return Round(drafted + beside, accepted, committed, drafted if beside else None)
    return Round(drafted + beside, committed, committed, committed) if beside else Round(committed, committed, committed)


def _stop(sure: Sequence[float], length: int, ends: bool, left: int, stopper: Stopper) -> int | None:
    """How many tokens are drafted: up to the first that the draft is not sure enough of, or ``length``.

    What is drafted behind the end of the continuation, if it is drafted rightly up to there, counts nowhere.

    Args:
        sure: the draft's confidence in each token; NaN where nobody looked.
        length: the most tokens.
        ends: whether the draft is right up to the end of the continuation.
        left: tokens of the continuation from here.
        stopper: of the stop rule.

    Returns:
        None where that is not known.
    """
    if stopper.rule.kind == "length" or length < 1:
        return max(length, 0)
    for place in range(length - 1):  # behind the last one there is nothing to stop
        if ends and place == left:
            break
        if math.isnan(sure[place]):
            return None
        if stopper.stops_at(sure[place]):
            return place + 1
    return length


def replay_lookup(continuation: Continuation, drafter: PromptLookup) -> list[Round]:
    """The rounds of decoding with a prompt lookup, as :func:`replay` gives them."""
    drafter.forget()
    text = [*continuation.prompt, *continuation.tokens]
    rounds = []
    start = 0
    while start < continuation.starts:
        limit, left = continuation.limit(start), continuation.starts - start
        here = len(continuation.prompt) + start + 1
        found = drafter.propose(text[:here], limit) if limit > 0 else []
        pairs = zip(found, text[here:], strict=False)
        accepted = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        rounds.append(_round(len(found), accepted, min(accepted + 1, left)))
        start += rounds[-1].committed
    return rounds


def count(rounds: Sequence[Round]) -> Counts:
    """The counts of rounds."""
    verified = [0.0] * (1 + max((r.drafted for r in rounds), default=0))
    accepted = tokens = longest = trees = 0
    for found in rounds:
        verified[found.drafted] += 1
        accepted += found.accepted
        tokens += found.committed
        longest += found.longest
        trees += found.depth is not None
    drafted = sum(r.drafted for r in rounds)
    return Counts(len(rounds), drafted, accepted, tokens, tuple(verified), drafted - longest, trees)


def expect(continuation: Continuation, trace: Trace, draft_length: int, stop: StopRule) -> Counts:
    """The expected counts of sampled decoding, given that the continuation is what came out.

    A stop rule looks at the confidences along the continuation; those behind a rejected token are taken to be alike. An adaptive
    threshold stays where it starts.

    Args:
        continuation: a sampled continuation.
        trace: a scan of the mask on it.
        draft_length: at most the trace's depth.
        stop: the stop rule.
    """
    stopper = Stopper(stop)
    visited = np.zeros(continuation.starts + 1)
    visited[0] = 1.0
    verified = np.zeros(draft_length + 1)
    accepted_in_all = 0.0
    for start in range(continuation.starts):
        left = continuation.starts - start
        length = max(min(draft_length, continuation.limit(start)), 0)
        sure = trace.confidence[start, : max(length - 1, 0)]
        stops = np.flatnonzero([stopper.stops_at(float(value)) for value in sure])
        drafted = int(stops[0]) + 1 if len(stops) else length
        within = min(drafted, left)  # what is drafted behind the end of the continuation counts nowhere
        # Chances of at least so many accepted; where the scan gave up, next to none.
        reached = np.concatenate(([1.0], np.cumprod(np.nan_to_num(trace.kept[start, :within]))))
        chances = reached - np.append(reached[1:], 0.0)
        for accepted, chance in enumerate(chances):
            ends = accepted == left  # inside the draft: trimmed to what was committed
            visited[min(start + accepted + 1, continuation.starts)] += visited[start] * chance
            accepted_in_all += visited[start] * chance * accepted
            verified[left if ends else drafted] += visited[start] * chance
    drafts = float(verified @ np.arange(draft_length + 1))
    return Counts(float(verified.sum()), drafts, accepted_in_all, float(continuation.starts), tuple(verified.tolist()))

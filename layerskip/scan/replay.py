"""The rounds of the real decoder, computed from a scan of one continuation.

Lossless decoding outputs the target's own tokens, so a greedy draft is accepted as far as it agrees with the continuation.
The agreement from every position, and the draft's confidence in each token, therefore determine every round for every
draft length and stop rule: greedy decoding is replayed exactly.

Sampled decoding accepts a token of the continuation with probability min(1, q / p), given that the continuation is the
output (arXiv 2211.17192, theorem 3.5 read backwards), where q is the draft's and p the target's probability. The rounds
are then a Markov chain over positions, and their expected counts follow without drawing anything.

Greedy drafts may have siblings (:mod:`layerskip.drafters.chain`): the continuation's token at the first wrong place may
be one of them. The number of siblings after that place, which no pass computed, is assumed to be the mean. It only changes
how many tokens a round verifies.

The drafts of a prompt lookup depend on the text alone, so its rounds are known without a scan. This holds for sampled
continuations too, because a token drafted with certainty is accepted exactly if it is the continuation's.
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
    """Counts of a decoding; expected values for sampled decoding.

    Args:
        rounds: rounds of draft and verification.
        drafted: drafted tokens.
        accepted: accepted tokens.
        tokens: tokens that the rounds committed; plain decoding would take one pass for each.
        verified: entry g: rounds that verified g drafted tokens.
        siblings: drafted tokens that are siblings, for which no draft pass ran.
        trees: rounds with siblings.
    """

    rounds: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    tokens: float = 0.0
    verified: tuple[float, ...] = ()
    siblings: float = 0.0
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
            self.siblings + other.siblings,
            self.trees + other.trees,
        )

    def to_list(self) -> list[Any]:
        """Return the counts as a list that JSON can hold."""
        return [self.rounds, self.drafted, self.accepted, self.tokens, list(self.verified), self.siblings, self.trees]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Counts:
        """Return the counts of a list from :meth:`to_list`."""
        rounds, drafted, accepted, tokens, verified, *tree_counts = values
        return cls(rounds, drafted, accepted, tokens, tuple(verified), *tree_counts)


def replay(
    continuation: Continuation,
    trace: Trace,
    num_speculative_tokens: int,
    stopper: Stopper,
    unresolved: dict[int, float],
    branching: Branching = CHAIN,
) -> list[Round]:
    """Replay greedy decoding and return its rounds. Tokens after an end of sequence are not counted.

    Args:
        continuation: the output to replay.
        trace: the drafts along it.
        num_speculative_tokens: at most the trace's depth.
        stopper: the stop rule's state, which adapts during the rounds.
        unresolved: output. Filled with the starts whose drafts have to be scanned past their first wrong token, because the
            stop rule needs those confidences, and the confidence threshold at each. While it is not empty, the rounds are a
            guess.
        branching: siblings of drafted tokens.
    """
    rounds = []
    agreed, confidences, rank = trace.as_lists()
    totals = trace.total_siblings(branching) if branching.siblings else None
    start, starts = 0, continuation.starts
    while start < starts:
        length, left = min(num_speculative_tokens, continuation.limit(start)), starts - start
        drafted = _drafted(confidences[start], length, left == agreed[start], left, stopper)
        if drafted is None:
            unresolved[start], drafted = stopper.threshold, length
        accepted = min(agreed[start], drafted)
        if totals is None:
            rounds.append(_round(drafted, accepted, min(accepted + 1, left)))
        else:
            siblings = totals[start]
            if accepted < drafted and rank[start][accepted] < siblings[accepted + 1] - siblings[accepted]:
                accepted += 1
            rounds.append(_round(drafted, accepted, min(accepted + 1, left), siblings[drafted]))
        start += rounds[-1].committed
        if start < starts:
            stopper.observe(drafted, accepted)
    return rounds


@functools.cache  # there are few different rounds, and a scan is replayed hundreds of times
def _round(drafted: int, accepted: int, committed: int, siblings: int = 0) -> Round:
    """Return a round as the decoder counts it."""
    if committed > accepted:
        return Round(drafted + siblings, accepted, committed, drafted if siblings else None)
    if siblings:
        return Round(drafted + siblings, committed, committed, committed)
    return Round(committed, committed, committed)


def _drafted(confidences: Sequence[float], length: int, ends: bool, left: int, stopper: Stopper) -> int | None:
    """Return the number of drafted tokens, up to the first after which the stop rule ends the draft, at most ``length``.

    A draft that is right up to the end of the continuation has no tokens counted after it.

    Args:
        confidences: the draft's confidence in each token; NaN where not computed.
        ends: whether the draft is right up to the end of the continuation.
        left: tokens of the continuation from here.

    Returns:
        None if a confidence that it depends on was not computed.
    """
    if stopper.rule.method == "length" or length < 1:
        return max(length, 0)
    for place in range(length - 1):  # the last token ends the draft anyway
        if ends and place == left:
            break
        if math.isnan(confidences[place]):
            return None
        if stopper.stops_at(confidences[place]):
            return place + 1
    return length


def replay_lookup(continuation: Continuation, drafter: PromptLookup) -> list[Round]:
    """Replay decoding with a prompt lookup and return its rounds."""
    drafter.reset()
    text = [*continuation.prompt, *continuation.tokens]
    rounds = []
    start = 0
    while start < continuation.starts:
        limit, left = continuation.limit(start), continuation.starts - start
        here = len(continuation.prompt) + start + 1
        draft = drafter.propose(text[:here], limit) if limit > 0 else []
        pairs = zip(draft, text[here:], strict=False)
        accepted = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        rounds.append(_round(len(draft), accepted, min(accepted + 1, left)))
        start += rounds[-1].committed
    return rounds


def count(rounds: Sequence[Round]) -> Counts:
    """Count rounds."""
    verified = [0.0] * (1 + max((r.drafted for r in rounds), default=0))
    accepted = tokens = longest = trees = 0
    for r in rounds:
        verified[r.drafted] += 1
        accepted += r.accepted
        tokens += r.committed
        longest += r.longest
        trees += r.depth is not None
    drafted = sum(r.drafted for r in rounds)
    return Counts(len(rounds), drafted, accepted, tokens, tuple(verified), drafted - longest, trees)


def expected_counts(continuation: Continuation, trace: Trace, num_speculative_tokens: int, stop: StopRule) -> Counts:
    """Compute the expected counts of sampled decoding, given that the continuation is the output.

    A stop rule sees the confidences along the continuation; those after a rejected token are assumed to be the same. An
    adaptive threshold stays at its initial value.

    Args:
        continuation: the output.
        trace: the drafts along it.
        num_speculative_tokens: at most the trace's depth.
        stop: the stop rule.
    """
    stopper = Stopper(stop)
    visits = np.zeros(continuation.starts + 1)  # expected rounds from each position
    visits[0] = 1.0
    verified = np.zeros(num_speculative_tokens + 1)
    total_accepted = 0.0
    for start in range(continuation.starts):
        left = continuation.starts - start
        length = max(min(num_speculative_tokens, continuation.limit(start)), 0)
        confidences = trace.confidence[start, : max(length - 1, 0)]
        stops = np.flatnonzero([stopper.stops_at(float(value)) for value in confidences])
        drafted = int(stops[0]) + 1 if len(stops) else length
        within = min(drafted, left)  # tokens after the end of the continuation are not counted
        # Probability that at least g tokens are accepted; about 0 where the scan gave up.
        at_least = np.concatenate(([1.0], np.cumprod(np.nan_to_num(trace.acceptance[start, :within]))))
        exactly = at_least - np.append(at_least[1:], 0.0)
        for accepted, probability in enumerate(exactly):
            ends = accepted == left  # the output ends inside the draft, which is trimmed to the committed tokens
            visits[min(start + accepted + 1, continuation.starts)] += visits[start] * probability
            total_accepted += visits[start] * probability * accepted
            verified[left if ends else drafted] += visits[start] * probability
    drafts = float(verified @ np.arange(num_speculative_tokens + 1))
    return Counts(float(verified.sum()), drafts, total_accepted, float(continuation.starts), tuple(verified.tolist()))

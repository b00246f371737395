"""The rounds of the real decoder, computed from a scan of one continuation.

Lossless decoding outputs the target's own tokens, so a greedy draft is accepted as far as it agrees with the continuation.
The agreement from every position, and the draft's confidence in each token, therefore determine every round for every
draft length and threshold: greedy decoding is replayed exactly.

Sampled decoding accepts a token of the continuation with probability min(1, q / p), given that the continuation is the
output (arXiv 2211.17192, theorem 3.5 read backwards), where q is the draft's and p the target's probability. The rounds
are then a Markov chain over positions, and their expected counts follow without drawing anything.

The drafts of a prompt lookup depend on the text alone, so its rounds are known without a scan. This holds for sampled
continuations too, because a token drafted with certainty is accepted exactly if it is the continuation's.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerskip.config import StopRule
from layerskip.decoding.stats import Round
from layerskip.drafters.prompt_lookup import PromptLookup
from layerskip.texts.continuations import Continuation


@dataclass(frozen=True, eq=False)
class Trace:
    """The drafts of one mask from every position of a continuation; NaN where they were not computed.

    Acceptance is the probability that a drafted token is accepted, given that those before it were and that the continuation
    is the output; 1 or 0 for greedy decoding.
    """

    confidence: NDArray[np.float64]  # ``[S, depth]``: the draft's probability of its most likely token
    acceptance: NDArray[np.float64]  # ``[S, depth]``

    @property
    def depth(self) -> int:
        """The longest recorded draft."""
        return int(self.confidence.shape[1])

    @functools.cached_property
    def lists(self) -> tuple[list[int], list[list[float]]]:
        """Of a finished greedy scan, from every position: how many drafted tokens agree, and their confidences."""
        return np.cumprod(self.acceptance == 1.0, axis=1).sum(axis=1).tolist(), self.confidence.tolist()


@dataclass(frozen=True)
class Counts:
    """Counts of a decoding; expected values for sampled decoding."""

    tokens: float = 0.0  # that the rounds committed; plain decoding would take one pass for each
    verified: Sequence[float] = ()  # entry g: rounds that verified g drafted tokens

    @property
    def drafted(self) -> float:
        return sum(drafted * rounds for drafted, rounds in enumerate(self.verified))

    def __add__(self, other: Counts) -> Counts:
        verified = itertools.zip_longest(self.verified, other.verified, fillvalue=0.0)
        return Counts(self.tokens + other.tokens, tuple(map(sum, verified)))


def replay(continuation: Continuation, trace: Trace, num_speculative_tokens: int, stop: StopRule) -> list[Round]:
    """Replay greedy decoding and return its rounds. Tokens after an end of sequence are not counted.

    Raises:
        ValueError: the scan ended drafts whose confidence was above the threshold of the stop rule.
    """
    rounds: list[Round] = []
    agreed, confidences = trace.lists
    start, starts = 0, continuation.starts
    while start < starts:
        drafted, left = max(min(num_speculative_tokens, continuation.limit(start)), 0), starts - start
        if stop.method == "threshold":
            # The last token ends a draft anyway, and a draft that is right up to the end has no tokens counted after it.
            decisive = min(drafted - 1, left) if agreed[start] == left else drafted - 1
            drafted = _stopped(confidences[start][: max(decisive, 0)], stop.threshold) or drafted
        accepted = min(agreed[start], drafted)
        rounds.append(_round(drafted, accepted, min(accepted + 1, left)))
        start += rounds[-1].committed
    return rounds


def _stopped(confidences: Sequence[float], threshold: float) -> int | None:
    """Return the number of tokens up to the first one whose confidence ends the draft; None if none does."""
    for place, confidence in enumerate(confidences):
        if math.isnan(confidence):
            raise ValueError(f"threshold: drafts were not scanned down to a confidence of {threshold}")
        if confidence < threshold:
            return place + 1
    return None


@functools.cache  # there are few different rounds, and a scan is replayed often
def _round(drafted: int, accepted: int, committed: int) -> Round:
    """Return a round as the decoder counts it, which trims a draft at the end of the output."""
    return Round(drafted if committed > accepted else committed, accepted, committed)


def replay_lookup(continuation: Continuation, drafter: PromptLookup) -> list[Round]:
    """Replay decoding with a prompt lookup and return its rounds."""
    drafter.reset()
    text = [*continuation.prompt, *continuation.tokens]
    rounds, start = list[Round](), 0
    while start < continuation.starts:
        limit, left = continuation.limit(start), continuation.starts - start
        here = len(continuation.prompt) + start + 1
        draft = drafter.propose(text[:here], limit)[0] if limit > 0 else []
        pairs = zip(draft, text[here:], strict=False)
        accepted = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        rounds.append(_round(len(draft), accepted, min(accepted + 1, left)))
        start += rounds[-1].committed
    return rounds


def count(rounds: Sequence[Round]) -> Counts:
    """Count rounds."""
    verified = [0.0] * (1 + max((r.drafted for r in rounds), default=0))
    for r in rounds:
        verified[r.drafted] += 1
    return Counts(sum(r.committed for r in rounds), tuple(verified))


def expected_counts(continuation: Continuation, trace: Trace, num_speculative_tokens: int, stop: StopRule) -> Counts:
    """Compute the expected counts of sampled decoding, given that the continuation is the output.

    A stop rule sees the confidences along the continuation; those after a rejected token are assumed to be the same.
    """
    threshold = stop.threshold if stop.method == "threshold" else 0.0
    visits = np.zeros(continuation.starts + 1)  # expected rounds from each position
    visits[0] = 1.0
    verified = np.zeros(num_speculative_tokens + 1)
    for start in range(continuation.starts):
        left = continuation.starts - start
        length = max(min(num_speculative_tokens, continuation.limit(start)), 0)
        confidences = trace.confidence[start, : max(length - 1, 0)]
        stops = np.flatnonzero(confidences < threshold)
        drafted = int(stops[0]) + 1 if len(stops) else length
        within = min(drafted, left)  # tokens after the end of the continuation are not counted
        # Probability that at least g tokens are accepted; about 0 where the scan gave up.
        at_least = np.concatenate(([1.0], np.cumprod(np.nan_to_num(trace.acceptance[start, :within]))))
        exactly = at_least - np.append(at_least[1:], 0.0)
        for accepted, probability in enumerate(exactly):
            ends = accepted == left  # the output ends inside the draft, which is trimmed to the committed tokens
            visits[min(start + accepted + 1, continuation.starts)] += visits[start] * probability
            verified[left if ends else drafted] += visits[start] * probability
    return Counts(float(continuation.starts), tuple(verified.tolist()))

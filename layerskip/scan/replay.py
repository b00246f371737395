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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip.config import StopRule
from layerskip.decoding.stats import Round
from layerskip.decoding.stopping import Stopper
from layerskip.drafters.prompt_lookup import PromptLookup
from layerskip.texts.continuations import Continuation


@dataclass(frozen=True)
class Branching:
    """Siblings of the tokens of a chain: the fields of the same names in ``SpeculativeConfig``."""

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
        """Record the draft's confidence in the token at a place from 0, and the probabilities of its K runners-up."""
        self.confidence[start, place], self.runner_probs[start, place] = confidence, runner_probs
        self._lists.clear()

    def record_acceptance(self, start: int, place: int, acceptance: float, rank: int) -> None:
        """Record the acceptance of the token at a place from 0, and which runner-up is the text's token."""
        self.acceptance[start, place], self.rank[start, place] = acceptance, rank
        self.agreed[start] += acceptance == 1.0 and self.agreed[start] == place
        self._lists.clear()

    def as_lists(self) -> list[Any]:
        """Return ``agreed``, ``confidence`` and ``rank`` as lists, whose items are faster to access."""
        if None not in self._lists:
            self._lists[None] = [self.agreed.tolist(), self.confidence.tolist(), self.rank.tolist()]
        return self._lists[None]

    def total_siblings(self, branching: Branching) -> list[Any]:
        """Return ``[S, depth + 1]`` as lists: at g, the siblings of the first g drafted tokens together.

        Tokens whose siblings were not computed have the mean number.
        """
        if branching.siblings > self.runner_probs.shape[2]:
            raise ValueError(f"siblings: {branching.siblings} per token, but {self.runner_probs.shape[2]} were scanned")
        if branching not in self._lists:
            probs = self.runner_probs[:, :, : branching.siblings]
            counts = (probs >= branching.min_token_prob).sum(-1)
            unknown = np.isnan(probs).any(-1)
            counts[unknown] = round(float(counts[~unknown].mean())) if not unknown.all() else 0
            self._lists[branching] = np.pad(counts.cumsum(1), ((0, 0), (1, 0))).tolist()
        return self._lists[branching]


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
        return Counts(
            self.rounds + other.rounds,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.tokens + other.tokens,
            tuple(map(sum, itertools.zip_longest(self.verified, other.verified, fillvalue=0.0))),
            self.siblings + other.siblings,
            self.trees + other.trees,
        )

    def to_list(self) -> list[Any]:
        """Return the counts as a list that JSON can hold."""
        return [self.rounds, self.drafted, self.accepted, self.tokens, list(self.verified), self.siblings, self.trees]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Counts:
        """Return the counts of a list from :meth:`to_list`."""
        rounds, drafted, accepted, tokens, verified, siblings, trees = values
        return cls(rounds, drafted, accepted, tokens, tuple(verified), siblings, trees)


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
        stopper: the stop rule's state, which adapts during the rounds.
        unresolved: output. Gets the starts whose drafts have to be scanned past their first wrong token, because the stop
            rule needs those confidences, with the threshold at each. While it is not empty, the rounds are a guess.
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
        accepted, extra = min(agreed[start], drafted), 0
        if totals is not None:
            siblings = totals[start]
            extra = siblings[drafted]
            if accepted < drafted and rank[start][accepted] < siblings[accepted + 1] - siblings[accepted]:
                accepted += 1
        rounds.append(_round(drafted, accepted, min(accepted + 1, left), extra))
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

    None if it depends on a confidence that was not computed. A draft that is right up to the end of the continuation, which
    has ``left`` tokens, has no tokens counted after it.
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

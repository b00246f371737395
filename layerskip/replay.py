"""What would the real decoder have done? Its rounds, counted from what a scan knows of one passage.

Lossless decoding gives the target's own tokens, so a drafted token is accepted exactly as long as the draft agrees with the
passage. The run of agreement from every position, and how sure the draft was of each token, therefore decide every round for
every draft length and stop rule: greedy decoding is replayed exactly. Where tokens are sampled, a token of the passage is
accepted with probability min(1, q / p), given that the passage is what came out (arXiv 2211.17192, theorem 3.5 read
backwards), so the rounds are a Markov chain over its positions and their expected counts follow without drawing anything.

What a prompt lookup drafts depends on the text alone, so its rounds are known without any scan; where tokens are sampled
too, since, given the passage, a token drafted for certain is accepted exactly if it is the passage's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import StopRule
from .drafters.prompt_lookup import PromptLookup
from .drafters.stopping import Stopper
from .passages import Passage


@dataclass(frozen=True, eq=False)
class Trace:
    """What the draft of one mask does from every position of a passage.

    Args:
        agreed: ``[S]`` int64: how many drafted tokens in a row are the passage's; counted up to the scan's depth.
        confidence: ``[S, depth]`` float64: the draft's probability of its most likely token; NaN where nobody looked.
        kept: ``[S, depth]`` float64: the chance that a drafted token is accepted, given that those before it were and that
            the passage comes out; 1 or 0 for greedy decoding.
    """

    agreed: NDArray[np.int64]
    confidence: NDArray[np.float64]
    kept: NDArray[np.float64]

    @property
    def depth(self) -> int:
        """The longest draft that was looked at."""
        return int(self.confidence.shape[1])


@dataclass(frozen=True)
class Counts:
    """What decoding takes, counted; expected values where tokens are sampled.

    Args:
        rounds: rounds of draft and verification.
        drafted: drafted tokens.
        accepted: accepted ones.
        tokens: tokens that the rounds committed; a plain decoder would take one pass for each.
        verified: entry g: rounds that verified g drafted tokens.
    """

    rounds: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    tokens: float = 0.0
    verified: tuple[float, ...] = ()

    def __add__(self, other: Counts) -> Counts:
        size = max(len(self.verified), len(other.verified))
        padded = [c.verified + (0.0,) * (size - len(c.verified)) for c in (self, other)]
        return Counts(
            self.rounds + other.rounds,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.tokens + other.tokens,
            tuple(one + another for one, another in zip(*padded, strict=True)),
        )

    def to_list(self) -> list[Any]:
        """Plain values."""
        return [self.rounds, self.drafted, self.accepted, self.tokens, list(self.verified)]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Counts:
        """The counts that :meth:`to_list` wrote."""
        rounds, drafted, accepted, tokens, verified = values
        return cls(rounds, drafted, accepted, tokens, tuple(verified))

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0.0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


def replay(
    passage: Passage, trace: Trace, draft_length: int, stopper: Stopper, open_starts: dict[int, float]
) -> list[tuple[int, int, int]]:
    """The rounds of greedy decoding: drafted, accepted and committed tokens of each.

    As :class:`~layerskip.stats.Round` counts them: what lies behind an end of sequence counts nowhere.

    Args:
        passage: the target's own continuation.
        trace: a scan of the mask on it.
        draft_length: at most the trace's depth.
        stopper: of the stop rule; adapts as the rounds go.
        open_starts: takes the positions whose drafts would have to be followed beyond their first wrong token, as the stop
            rule looks at those too, and how sure it wants them; while there are any, the rounds are a guess.
    """
    rounds = []
    start = 0
    while start < passage.starts:
        length = min(draft_length, passage.limit(start))
        drafted = _stop(trace, start, length, passage.starts - start, stopper, open_starts)
        accepted = min(int(trace.agreed[start]), drafted)
        committed = min(accepted + 1, passage.starts - start)
        if committed <= accepted:
            drafted = accepted = committed
        rounds.append((drafted, accepted, committed))
        start += committed
        if start < passage.starts:
            stopper.observe(drafted, accepted)
    return rounds


def _stop(trace: Trace, start: int, length: int, left: int, stopper: Stopper, open_starts: dict[int, float]) -> int:
    """How many tokens are drafted: up to the first that the draft is not sure enough of, or ``length``.

    What is drafted behind the end of the passage, if it is drafted rightly up to there, counts nowhere.
    """
    if stopper.rule.kind == "length" or length < 1:
        return max(length, 0)
    for place in range(length - 1):  # behind the last one there is nothing to stop
        if place == left == trace.agreed[start]:
            break
        sure = trace.confidence[start, place]
        if np.isnan(sure):
            open_starts[start] = stopper.threshold
            break
        if stopper.stops_at(float(sure)):
            return place + 1
    return length


def replay_lookup(passage: Passage, drafter: PromptLookup) -> list[tuple[int, int, int]]:
    """The rounds of decoding with a prompt lookup, as :func:`replay` gives them."""
    drafter.forget()
    text = [*passage.prompt, *passage.tokens]
    rounds = []
    start = 0
    while start < passage.starts:
        limit, left = passage.limit(start), passage.starts - start
        here = len(passage.prompt) + start + 1
        found = drafter.propose(text[:here], limit) if limit > 0 else []
        pairs = zip(found, text[here:], strict=False)
        accepted = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        committed = min(accepted + 1, left)
        drafted = len(found)
        if committed <= accepted:
            drafted = accepted = committed
        rounds.append((drafted, accepted, committed))
        start += committed
    return rounds


def count(rounds: list[tuple[int, int, int]]) -> Counts:
    """The counts of replayed rounds."""
    verified = [0.0] * (1 + max((drafted for drafted, _, _ in rounds), default=0))
    for drafted, _, _ in rounds:
        verified[drafted] += 1
    drafted, accepted, committed = (sum(part) for part in zip(*rounds, strict=True)) if rounds else (0, 0, 0)
    return Counts(len(rounds), drafted, accepted, committed, tuple(verified))


def expect(passage: Passage, trace: Trace, draft_length: int, stop: StopRule) -> Counts:
    """The expected counts of sampled decoding, given that the passage is what came out.

    A stop rule looks at the confidences along the passage; those behind a rejected token are taken to be alike. An adaptive
    threshold stays where it starts.

    Args:
        passage: a sampled continuation.
        trace: a scan of the mask on it.
        draft_length: at most the trace's depth.
        stop: the stop rule.
    """
    stopper = Stopper(stop)
    visited = np.zeros(passage.starts + 1)
    visited[0] = 1.0
    verified = np.zeros(draft_length + 1)
    accepted_in_all = 0.0
    for start in range(passage.starts):
        left = passage.starts - start
        length = max(min(draft_length, passage.limit(start)), 0)
        sure = trace.confidence[start, : max(length - 1, 0)]
        stops = np.flatnonzero([stopper.stops_at(float(value)) for value in sure])
        drafted = int(stops[0]) + 1 if len(stops) else length
        within = min(drafted, left)  # what is drafted behind the end of the passage counts nowhere
        # Chances of at least so many accepted; where the scan gave up, next to none.
        reached = np.concatenate(([1.0], np.cumprod(np.nan_to_num(trace.kept[start, :within]))))
        chances = reached - np.append(reached[1:], 0.0)
        for accepted, chance in enumerate(chances):
            ends = accepted == left  # inside the draft: trimmed to what was committed
            visited[min(start + accepted + 1, passage.starts)] += visited[start] * chance
            accepted_in_all += visited[start] * chance * accepted
            verified[left if ends else drafted] += visited[start] * chance
    drafts = float(verified @ np.arange(draft_length + 1))
    return Counts(float(verified.sum()), drafts, accepted_in_all, float(passage.starts), tuple(verified.tolist()))

"""Cascades: each round is drafted by one of several drafters, and all of them learn from it. This follows no paper.

Every lookup drafts, and as many tokens of its draft are kept as are worth their verification at the recent rate of tokens
per step. A member that runs a model, or needs a pass of the target, is tried if its rounds promise more tokens per step than
the best lookup and than plain decoding. The estimate is the mean of its recent rounds, those of earlier texts included. A
member that was not tried for many rounds is tried again, because texts change. Rounds are compared by tokens per step, not
by their gain over the recent rate: that rate includes rounds of lookups that accepted many tokens, and no such round can be
had where nothing can be looked up.

Without the costs of verification, verifying counts as free. Without those of drafting, members that run a model draft where
no lookup pays.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from layerskip.config import ConfigError, Costs, Method, SpeculativeConfig, check_number, shared
from layerskip.decoding.draft import MAX_MATCH, Draft
from layerskip.decoding.drafter import Context, Drafter, LateRead, VerifyOutput
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.verify import Verdict
from layerskip.drafters.registry import build_drafter
from layerskip.models.cache import KVCache
from layerskip.models.target import Target

_DECAY = 0.99  # per round, of the totals that give the recent rate
_WINDOW = 128  # rounds, or tokens of one grade; older ones fade
_CONTINUES = 0.9  # prior probability of a token whose predecessor was accepted
_MIN_PROB = 1e-6  # smaller probabilities count as this one
_EARLIER_WEIGHT = 16  # rounds that the mean of earlier texts counts for in a new text
_PATIENCE = 128  # rounds in a row without a member before it is tried again
_PRIOR_ROUNDS = 2  # prior rounds of a member, each with one accepted token at the cost of a step


def _check(config: SpeculativeConfig) -> None:
    if not isinstance(config.members, tuple) or len(config.members) < 2:
        raise ConfigError("members: a cascade needs at least two configurations")
    for member in config.members:
        if not isinstance(member, SpeculativeConfig) or member.method in ("none", "cascade"):
            raise ConfigError(f"members: {member!r} is not the configuration of a single drafter")
    for name, costs, minimum in (("verify_cost", config.verify_cost, 0.1), ("draft_cost", config.draft_cost, 0.0)):
        if not isinstance(costs, tuple):
            raise ConfigError(f"{name}: {costs!r} is not a list of numbers")
        for cost in costs:
            check_number(name, cost, minimum, 1e6)
    if config.draft_cost and not config.verify_cost:
        raise ConfigError("draft_cost: has no effect without verify_cost")
    if config.draft_cost and len(config.draft_cost) != len(config.members):
        raise ConfigError(f"draft_cost: {len(config.draft_cost)} numbers for {len(config.members)} members")


class _Estimates:
    """Estimates of how many tokens of a lookup will be accepted: how often the text took earlier tokens like its own.

    How much the length of a match says depends on the text, and so does the calibration of a drafter's own probabilities. A
    lookup is scored by the text as it goes on, so estimates also exist for declined drafts and for tokens that were cut off.
    All evidence is from earlier rounds; nothing depends on the tokens being drafted.
    """

    def __init__(self) -> None:
        self._means: dict[Hashable, tuple[int, float]] = {}
        # The lookups of the present text to score once it has gone on: member, draft, and the tokens before it.
        self.undecided: list[tuple[int, Draft, int]] = []

    def prefix_means(self, member: int, draft: Draft) -> Iterator[float]:
        """Yield the estimated accepted tokens of the draft's first token alone, its first two, and so on."""
        total = 0.0
        for grade, prior in _grades(member, draft):
            count, mean = self._means.get(grade, (0, 0.0))
            total += (count * mean + prior) / (count + 1)
            yield total

    def update(self, text: Sequence[int]) -> None:
        """Score the lookups that the text has decided; ``text`` continues that of the last call."""
        undecided = []
        for member, draft, start in self.undecided:
            path, complete = _match_text(draft, text[start:])
            if not complete and start + len(path) >= len(text):
                undecided.append((member, draft, start))
                continue
            for node, (grade, _) in enumerate(_grades(member, draft)):
                count, mean = self._means.get(grade, (0, 0.0))
                count = min(count + 1, _WINDOW)
                self._means[grade] = count, mean + ((node in path) - mean) / count
        self.undecided = undecided


def _grades(member: int, draft: Draft) -> Iterator[tuple[Hashable, float]]:
    """Yield, per token, its grade (member, length of match, depth and rough probability) and its prior probability."""
    depths: list[int] = []
    for node, parent in enumerate(draft.known_parents):
        depth = 1 if parent < 0 else depths[parent] + 1
        depths.append(depth)
        prob = draft.path_probs[node] if draft.path_probs else _CONTINUES**depth
        yield (member, min(draft.match_length, MAX_MATCH), depth, round(-2 * math.log2(max(prob, _MIN_PROB)))), prob


def _match_text(draft: Draft, text: Sequence[int]) -> tuple[list[int], bool]:
    """Return the nodes of a draft on the branch that a text takes, and whether that branch ends there."""
    children: dict[tuple[int, int], int] = {}
    for node, child in enumerate(zip(draft.known_parents, draft.lookup_tokens, strict=True)):
        children.setdefault(child, node)
    last, path = -1, list[int]()
    for token in text:
        if (last, token) not in children:
            break
        last = children[last, token]
        path.append(last)
    return path, last not in draft.known_parents


@dataclass
class _RoundMeans:
    """Means of the rounds in which a member was tried, and the number of rounds since."""

    rounds: int = _PRIOR_ROUNDS
    accepted: float = 1.0  # tokens of its drafts
    cost: float = 1.0  # of drafting and verification, in steps of plain decoding
    skipped: int = 0

    def add(self, accepted: float, cost: float) -> None:
        self.rounds = min(self.rounds + 1, _WINDOW)
        self.accepted += (accepted - self.accepted) / self.rounds
        self.cost += (cost - self.cost) / self.rounds


class Cascade(Drafter):
    """Several drafters; the one with the most expected tokens per step drafts. Estimates last from prompt to prompt.

    A member that needs a whole step to draft a token is never tried, as that cannot pay. Which member has a proposal, and
    the length of its match, must depend on the context only, not on drawn tokens. Costs are those of the configuration,
    empty if unknown.
    """

    method = Method(
        "cascade",
        (shared("members"), shared("verify_cost"), shared("draft_cost")),
        source="whichever of several pays most",
        rank=10,
        color="#d62728",
        label=lambda config: ", then ".join(member.label() for member in config.members),
        check=_check,
        second=False,
        benchmark={
            "members": [
                {"method": "prompt_lookup", "prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": 8},
                {"method": "token_recycling", "num_speculative_tokens": 6},
            ]
        },
        no_engine="the engine runs one drafter, and this configuration combines several",
    )
    keeps_state = True

    def __init__(self, members: Sequence[Drafter], verify_cost: Costs = (), draft_cost: Costs = ()) -> None:
        self.members = tuple(members)
        self.tree_tokens = max(member.tree_tokens for member in members)
        self.reads_features = any(member.reads_features for member in members)
        self.reads_logits = any(member.reads_logits for member in members)
        self._priced, self._verify_costs = bool(draft_cost), (1.0, *(verify_cost or (1.0,)))
        self._draft_cost = draft_cost or (0.0,) * len(self.members)
        self._lookups = [index for index, member in enumerate(members) if member.lookup]
        viable = [index for index, member in enumerate(members) if self._draft_cost[index] < 1 or member.single_pass]
        self._others = [index for index in viable if index not in self._lookups]
        self._drafted: int | None = None  # the index of the member whose draft is verified
        self._forget()

    @classmethod
    def build(cls, config: SpeculativeConfig, target: Target) -> Cascade:
        members = [build_drafter(member, target) for member in config.members]
        return cls(members, config.verify_cost, config.draft_cost)

    def _forget(self) -> None:
        self._estimates = _Estimates()
        self._tokens, self._steps = 1.0, 1.0  # of recent rounds
        self._rounds = {index: _RoundMeans() for index in self._others}

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Start every member; what is known from earlier texts counts for few rounds of this one."""
        self._drafted = None
        for member in self.members:
            member.start(prompt, cache, chooser)
        self._estimates.undecided.clear()
        for means in self._rounds.values():
            means.rounds = min(means.rounds, _EARLIER_WEIGHT)

    def reset_state(self) -> None:
        for member in self.members:
            member.reset_state()
        self._forget()

    def draft(self, context: Context, limit: int) -> Draft:
        """Return the lookup with the most tokens per step, or the draft of a member that promises more."""
        self._estimates.update(context.tokens)
        self._drafted = None
        self._asked: dict[int, float] = {}  # the members tried that run a model, and the costs of their drafts
        best, best_rate = Draft.empty(context.last.device), 0.0
        for index in self._lookups:
            draft = self.members[index].draft(context, limit)
            if draft.lookup_tokens:
                self._estimates.undecided.append((index, draft, len(context.tokens)))
                size, rate = self._best_size(index, draft)
                if rate > best_rate:
                    self._drafted, best, best_rate = index, draft.truncate(size), rate
        for index in self._promising(max(best_rate, 1.0)):
            draft = self.members[index].draft(context, limit)
            self._asked[index] = self.members[index].steps(draft) * self._draft_cost[index]
            if draft.tokens.shape[0]:
                self._drafted, best = index, draft
                break
        for index, means in self._rounds.items():
            means.skipped = 0 if index in self._asked else means.skipped + 1
        self._size = best.tokens.shape[0]  # with those that only fill up a DeviceTree, as its pass computes them, too
        return best

    def _promising(self, rate: float) -> list[int]:
        """Return the members that run a model and promise more than ``rate`` tokens per step, the best first.

        Without draft costs these are all of them if no lookup pays, and none otherwise.
        """
        if not self._priced:
            return self._others if self._drafted is None else []
        rates = {index: (1 + means.accepted) / means.cost for index, means in self._rounds.items()}
        for index, means in self._rounds.items():
            if means.skipped >= _PATIENCE:
                rates[index] = math.inf
                means.rounds = min(means.rounds, _PRIOR_ROUNDS)  # so that new rounds weigh more than the old ones
        return sorted((index for index in rates if rates[index] > rate), key=lambda index: -rates[index])

    def _best_size(self, index: int, draft: Draft) -> tuple[int, float]:
        """Return how many of a lookup's first tokens gain most over the cost of their verification, and their rate.

        A round's cost is valued at the recent rate, as other rounds would have used that time. Both are 0 if no size pays.
        """
        maximum, best, recent_rate = 0.0, (0, 0.0), self._tokens / self._steps
        for size, accepted in enumerate(self._estimates.prefix_means(index, draft), 1):
            cost = self._verify_cost(size)
            if (gain := accepted - recent_rate * (cost - 1)) > maximum:
                maximum, best = gain, (size, (1 + accepted) / cost)
        return best

    def _verify_cost(self, size: int) -> float:
        """Return the cost of verifying that many tokens, in steps of plain decoding, extrapolated linearly."""
        costs = self._verify_costs  # the first one is that of no token
        if size < len(costs):
            return costs[size]
        return costs[-1] + max(0.0, costs[-1] - costs[1]) / max(1, len(costs) - 2) * (size - len(costs) + 1)

    def observe_features(self, features: Tensor) -> None:
        for member in self.members:
            if member.reads_features:
                member.observe_features(features)

    def observe_logits(self, output: VerifyOutput) -> Sequence[LateRead]:
        return [late for member in self.members for late in member.observe_logits(output)]

    def observe(self, verdict: Verdict) -> None:
        """Pass the verdict to the member that drafted, and add the round to the estimates."""
        if self._drafted is not None:
            self.members[self._drafted].observe(verdict)
        verify_cost = self._verify_cost(self._size)
        if self._priced or not self._asked:  # else the cost of the round is unknown
            self._tokens = _DECAY * self._tokens + verdict.accepted + 1
            self._steps = _DECAY * self._steps + sum(self._asked.values()) + verify_cost
        for index, draft_cost in self._asked.items():  # a member whose draft was not verified gained nothing
            accepted, cost = (verdict.accepted, verify_cost) if index == self._drafted else (0, 1.0)
            self._rounds[index].add(accepted, draft_cost + cost)

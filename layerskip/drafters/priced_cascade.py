"""A cascade that knows costs: each round is drafted by the member with the most expected tokens for the round's cost.

Every lookup drafts, and as many tokens of its draft are kept as are worth their verification at the recent rate of tokens
per step. A member that runs a model, or needs a pass of the target, is tried if its rounds promise more tokens per step than
the best lookup and than plain decoding. The estimate is the mean of its rounds in this text and in earlier texts. A member
that was not tried for many rounds is tried again, as texts change.

Rounds are compared by tokens per step, not by their gain over the recent rate: that rate includes rounds of lookups that
accepted many tokens, and no such round can be had where nothing can be looked up. This follows no paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from layerskip.config import ConfigError, Kind, SpeculativeConfig
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, Lookup, draft_steps, is_single_pass
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.verify import Verdict
from layerskip.drafters.cascade import Cascade, CascadeBase, draft_group
from layerskip.drafters.expected_acceptance import AcceptanceEstimates
from layerskip.drafters.registry import build_drafter, register
from layerskip.models.cache import KVCache
from layerskip.models.target import Target
from layerskip.rules import Costs, check_costs, costs_at, tables_of

_DECAY = 0.99  # per round, of the totals that give the recent rate
_WINDOW = 128  # rounds of one member; older ones fade
_EARLIER_WEIGHT = 16  # rounds that the mean of earlier texts counts for in a new text
_PATIENCE = 128  # rounds in a row without a member before it is tried again
_PRIOR_ROUNDS = 2  # prior rounds of a member, each with one accepted token at the cost of a step


@dataclass
class _RoundMeans:
    """Means of the rounds in which a member was tried.

    Args:
        rounds: how many.
        accepted: accepted tokens of its drafts.
        cost: of drafting and verification, in steps of plain decoding.
    """

    rounds: int
    accepted: float
    cost: float

    def add(self, accepted: float, cost: float) -> None:
        """Add a round."""
        self.rounds = min(self.rounds + 1, _WINDOW)
        self.accepted += (accepted - self.accepted) / self.rounds
        self.cost += (cost - self.cost) / self.rounds


class PricedCascade(CascadeBase):
    """A cascade that tries the members with the most expected tokens per step. Estimates last from prompt to prompt.

    Args:
        members: as for any cascade.
        verify_cost: the cost of verifying 1, 2, ... drafted tokens, in steps of plain decoding. If it is known at several
            contexts, that of a text is interpolated at the length of its prompt; so is ``draft_cost``.
        draft_cost: what each member needs to draft one token of a chain, one level of a tree, or all levels if it drafts
            them in one pass, in such steps. Empty if unknown: members that run a model are then tried if no lookup pays. A
            member that needs a whole step for every token at every context is never tried, as that cannot pay.
    """

    def __init__(self, members: Sequence[Drafter], verify_cost: Costs, draft_cost: Costs = ()) -> None:
        super().__init__(members)
        self._priced, self._costs = bool(draft_cost), (verify_cost, draft_cost or (0.0,) * len(self.members))
        least = list(map(min, zip(*tables_of(self._costs[1]), strict=True)))
        self._lookups = [index for index, member in enumerate(members) if isinstance(member, Lookup) and member.lookup]
        viable = [index for index, member in enumerate(members) if least[index] < 1 or is_single_pass(member)]
        self._others = [index for index in viable if index not in self._lookups]
        self._estimates = AcceptanceEstimates(by_token=True)
        self._reset_rounds()

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Start every member; what is known from earlier texts counts for few rounds of this one."""
        super().start(prompt, cache, chooser)
        self._verify_costs, self._draft_cost = (costs_at(costs, len(prompt)) for costs in self._costs)
        self._estimates.start_text()
        self._this_text = {
            index: replace(means, rounds=min(means.rounds, _EARLIER_WEIGHT)) for index, means in self._all_texts.items()
        }

    def draft(self, context: Context, limit: int) -> Draft:
        """Return the lookup with the most tokens per step, or the draft of a member that promises more."""
        self._follow(context)
        self._estimates.update(context.tokens)
        self._drafted = None
        self._asked: dict[int, float] = {}  # the members tried that run a model, and the costs of their drafts
        best, best_rate = Draft.empty(context.last.device), 0.0
        for index in self._lookups:
            draft = self.members[index].draft(context, limit)
            if draft.lookup_tokens:
                self._estimates.track(draft_group(index, draft), draft, len(context.tokens))
                size, rate = self._best_size(index, draft)
                if rate > best_rate:
                    self._drafted, best, best_rate = index, draft.truncate(size), rate
        fallback: tuple[int, Draft] | None = None
        for index in self._promising(max(best_rate, 1.0)):
            draft = self.members[index].draft(context, limit)
            self._asked[index] = draft_steps(self.members[index], draft) * self._draft_cost[index]
            if not draft.tokens.shape[0]:
                continue
            if not draft.stopped_at_first:
                self._drafted, best = index, draft
                break
            fallback = fallback or (index, draft)
        if fallback is not None and self._drafted is None:
            self._drafted, best = fallback
        for index in self._others:
            self._skipped[index] = 0 if index in self._asked else self._skipped[index] + 1
        self._size = best.tokens.shape[0]  # with those that only fill up a DeviceTree, as its pass computes them, too
        return best

    def _promising(self, rate: float) -> list[int]:
        """Return the members that run a model and promise more than ``rate`` tokens per step, the best first.

        Without draft costs these are all of them if no lookup pays, and none otherwise.
        """
        if not self._priced:
            return self._others if self._drafted is None else []
        rates = {index: (1 + means.accepted) / means.cost for index, means in self._this_text.items()}
        for index in self._others:
            if self._skipped[index] >= _PATIENCE:
                rates[index] = math.inf
                # The next rounds then weigh more than the old ones.
                self._this_text[index].rounds = min(self._this_text[index].rounds, _PRIOR_ROUNDS)
        return sorted((index for index in rates if rates[index] > rate), key=lambda index: -rates[index])

    def _best_size(self, index: int, draft: Draft) -> tuple[int, float]:
        """Return how many of a lookup's first tokens gain most over the cost of their verification, and their rate.

        The cost of a round is valued at the recent rate, as other rounds would have used that time. Both are 0 if no size
        pays.
        """
        most, best = 0.0, (0, 0.0)
        recent_rate = self._tokens / self._steps
        for size, accepted in enumerate(self._estimates.prefix_means(draft_group(index, draft), draft), 1):
            cost = self._verify_cost(size)
            if (gain := accepted - recent_rate * (cost - 1)) > most:
                most, best = gain, (size, (1 + accepted) / cost)
        return best

    def _verify_cost(self, size: int) -> float:
        """Return the cost of verifying that many tokens, in steps of plain decoding, extrapolated linearly."""
        if not size:
            return 1.0
        first, last, count = self._verify_costs[0], self._verify_costs[-1], len(self._verify_costs)
        slope = max(0.0, last - first) / max(1, count - 1)
        return self._verify_costs[size - 1] if size <= count else last + slope * (size - count)

    def reset_state(self) -> None:
        """Drop all estimates and reset every member."""
        super().reset_state()
        self._estimates.reset()
        self._reset_rounds()

    def _reset_rounds(self) -> None:
        self._tokens, self._steps = 1.0, 1.0  # of recent rounds
        self._all_texts = {index: _RoundMeans(_PRIOR_ROUNDS, 1.0, 1.0) for index in self._others}
        self._skipped = dict.fromkeys(self._others, 0)  # rounds since each member was tried

    def observe(self, verdict: Verdict) -> None:
        """Pass the verdict to the member that drafted, and add the round to the estimates."""
        super().observe(verdict)
        verify_cost = self._verify_cost(self._size)
        if self._priced or not self._asked:  # else the cost of the round is unknown
            self._tokens = _DECAY * self._tokens + verdict.accepted + 1
            self._steps = _DECAY * self._steps + sum(self._asked.values()) + verify_cost
        for index, draft_cost in self._asked.items():  # a member whose draft was not verified gained nothing
            accepted, cost = (verdict.accepted, verify_cost) if index == self._drafted else (0, 1.0)
            for means in (self._all_texts, self._this_text):
                means[index].add(accepted, draft_cost + cost)


def _build(config: SpeculativeConfig, target: Target) -> Drafter:
    members = [build_drafter(member, target) for member in config.members]
    # A lossy rule accepts tokens that the text does not contain, so the text cannot score a declined draft.
    if config.verify_cost and config.lossless:
        return PricedCascade(members, config.verify_cost, config.draft_cost)
    return Cascade(members)


def _check(config: SpeculativeConfig) -> None:
    if not isinstance(config.members, tuple) or len(config.members) < 2:
        raise ConfigError("members: a cascade needs at least two configurations")
    for member in config.members:
        if not isinstance(member, SpeculativeConfig) or member.kind in ("none", "cascade") or not member.lossless:
            raise ConfigError(f"members: {member!r} is not the configuration of a single lossless drafter")
    check_costs("verify_cost", config.verify_cost, 0.1)
    check_costs("draft_cost", config.draft_cost, 0.0)
    if config.draft_cost and not config.verify_cost:
        raise ConfigError("draft_cost: has no effect without verify_cost")
    numbers = len(tables_of(config.draft_cost)[0])
    if config.draft_cost and numbers != len(config.members):
        raise ConfigError(f"draft_cost: {numbers} numbers for {len(config.members)} members")


register(
    Kind(
        "cascade",
        ("members", "verify_cost", "draft_cost"),
        check=_check,
        label=lambda config: ", then ".join(member.label() for member in config.members),
        benchmark={
            "members": [
                {"kind": "prompt_lookup", "ngram_min": 2, "ngram_max": 4, "draft_length": 8},
                {
                    "kind": "token_recycling",
                    "draft_length": 6,
                    "tree_tokens": 8,
                    "candidates": 4,
                    "least_probability": 0.05,
                },
            ]
        },
    ),
    _build,
)

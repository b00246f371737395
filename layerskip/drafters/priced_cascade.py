"""Drafting by whichever of several drafters brings most for what its round takes, where it is known what that is.

All are asked that find their drafts without running a model, and of each draft as many tokens are kept as pay for themselves
at the pace at which tokens come lately. One that runs a model, or asks the target something, is asked where it promises more
than what was found, and than a step of plain decoding: what its rounds have brought for what they took, in this text and
before it. Who was not asked for long is asked again, as texts change.

Rounds are compared by their tokens over their time, and not by what they bring beyond the usual pace: where nothing can be
looked up, a pace at which tokens come by the dozen elsewhere is not to be had. This follows no paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from layerskip.config import ConfigError, Kind, SpeculativeConfig
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, Finder, drafts_at_once, steps_of
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.verify import Verdict
from layerskip.drafters.cascade import Cascade, Members, like
from layerskip.drafters.expected_acceptance import Expectation
from layerskip.drafters.registry import build_drafter, register
from layerskip.models.cache import KVCache
from layerskip.models.target import Target
from layerskip.rules import check_number

_KEPT = 0.99  # of what is known of the pace, from round to round
_LATELY = 128  # rounds of one member; older ones fade
_BEFORE = 16  # rounds of this text that what is known from before counts for
_PATIENCE = 128  # rounds on end that somebody is not asked in
_HOPED = 2  # rounds that brought a token for nothing, before any is known


@dataclass
class _Yield:
    """What the rounds that a member was asked in brought and took, on average.

    Args:
        rounds: how many.
        accepted: tokens of its drafts.
        cost: of drafting and verifying, in steps of plain decoding.
    """

    rounds: int
    accepted: float
    cost: float

    def add(self, accepted: float, cost: float) -> None:
        """Another round."""
        self.rounds = min(self.rounds + 1, _LATELY)
        self.accepted += (accepted - self.accepted) / self.rounds
        self.cost += (cost - self.cost) / self.rounds


class PricedCascade(Members):
    """Asks its members for what yields most; it knows from prompt to prompt what rounds brought, until told to forget.

    Args:
        members: as of any cascade.
        verify_cost: of verifying 1, 2, ... drafted tokens, in steps of plain decoding.
        draft_cost: what each member takes to draft a token of a chain, a level of a tree, or all levels where it drafts them
            at once, in such steps; empty where it is not known: who does not find drafts is asked then where nothing that
            was found pays. Whose every token takes a whole step is never asked, as that cannot pay.
    """

    def __init__(self, members: Sequence[Drafter], verify_cost: Sequence[float], draft_cost: Sequence[float] = ()) -> None:
        super().__init__(members)
        self._verify_cost = tuple(verify_cost)
        self._priced, self._draft_cost = bool(draft_cost), tuple(draft_cost) or (0.0,) * len(self.members)
        self._finders = [place for place, member in enumerate(members) if isinstance(member, Finder) and member.finds]
        able = [place for place, member in enumerate(members) if self._draft_cost[place] < 1 or drafts_at_once(member)]
        self._others = [place for place in able if place not in self._finders]
        self._expectation = Expectation(by_token=True)
        self._begin_to_learn()

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Start every member."""
        super().start(prompt, cache, chooser)
        self._expectation.begin()
        # A text may be unlike those before it.
        self._here = {place: replace(known, rounds=min(known.rounds, _BEFORE)) for place, known in self._ever.items()}

    def draft(self, context: Context, limit: int) -> Draft:
        """Of what is found what yields most, or the draft of whoever promises more; all learn the text."""
        self._follow(context)
        self._expectation.follow(context.tokens)
        self._drafted = None
        self._asked: dict[int, float] = {}  # places of members that do not find drafts, and what theirs took
        found, most = Draft.empty(context.last.device), 0.0
        for place in self._finders:
            draft = self.members[place].draft(context, limit)
            if draft.found:
                self._expectation.watch(like(place, draft), draft, len(context.tokens))
                size, worth = self._paying(place, draft)
                if worth > most:
                    self._drafted, found, most = place, draft.first(size), worth
        unsure: tuple[int, Draft] | None = None
        for place in self._promising(max(most, 1.0)):
            draft = self.members[place].draft(context, limit)
            self._asked[place] = steps_of(self.members[place], draft) * self._draft_cost[place]
            if not draft.tokens.shape[0]:
                continue
            if not draft.unsure:
                self._drafted, found = place, draft
                break
            unsure = unsure or (place, draft)
        if unsure is not None and self._drafted is None:
            self._drafted, found = unsure
        for place in self._others:
            self._spared[place] = 0 if place in self._asked else self._spared[place] + 1
        self._size = found.tokens.shape[0]
        return found

    def _promising(self, most: float) -> list[int]:
        """Places of members that do not find drafts, and promise to yield more than ``most``, the most promising first.

        Of whom it is not known what their drafts take, all do where nothing was found that pays.
        """
        if not self._priced:
            return self._others if self._drafted is None else []
        worth = {place: (1 + known.accepted) / known.cost for place, known in self._here.items()}
        for place in self._others:
            if self._spared[place] >= _PATIENCE:
                worth[place] = math.inf
                self._here[place].rounds = min(self._here[place].rounds, _HOPED)  # what it brings now says more
        return sorted((place for place in worth if worth[place] > most), key=lambda place: -worth[place])

    def _paying(self, place: int, draft: Draft) -> tuple[int, float]:
        """How many of a found draft's first tokens are worth most beyond what verifying them takes, and what they yield.

        Whatever a round takes could have been spent on others, in which tokens come at the usual pace. Where no token is
        worth it, both are 0.
        """
        most, best = 0.0, (0, 0.0)
        for size, accepted in enumerate(self._expectation.expect_each(like(place, draft), draft), 1):
            cost = self._verifying(size)
            if (gain := accepted - self._pace * (cost - 1)) > most:
                most, best = gain, (size, (1 + accepted) / cost)
        return best

    @property
    def _pace(self) -> float:
        """Tokens in the time of a step of plain decoding, lately."""
        return self._tokens / self._steps

    def _verifying(self, size: int) -> float:
        """What verifying so many tokens takes, in steps of plain decoding; what was not told continues what was."""
        if not size:
            return 1.0
        first, last, count = self._verify_cost[0], self._verify_cost[-1], len(self._verify_cost)
        beyond = max(0.0, last - first) / max(1, count - 1) * (size - count)
        return self._verify_cost[size - 1] if size <= count else last + beyond

    def forget(self) -> None:
        """Forget what rounds brought and drafts were worth, and let every member forget."""
        super().forget()
        self._expectation.forget()
        self._begin_to_learn()

    def _begin_to_learn(self) -> None:
        self._tokens, self._steps = 1.0, 1.0  # of rounds, lately: what they brought, and what they took
        self._ever = {place: _Yield(_HOPED, 1.0, 1.0) for place in self._others}
        self._spared = dict.fromkeys(self._others, 0)  # for how many rounds on end

    def observe(self, verdict: Verdict) -> None:
        """Tell the member whose draft it was, and remember what the round brought."""
        super().observe(verdict)
        verifying = self._verifying(self._size)
        if self._priced or not self._asked:  # else nobody knows what the round took
            self._tokens = _KEPT * self._tokens + verdict.accepted + 1
            self._steps = _KEPT * self._steps + sum(self._asked.values()) + verifying
        for place, drafting in self._asked.items():  # who was asked in vain has brought nothing
            accepted, cost = (verdict.accepted, verifying) if place == self._drafted else (0, 1.0)
            for known in (self._ever, self._here):
                known[place].add(accepted, drafting + cost)


def _build(config: SpeculativeConfig, target: Target) -> Drafter:
    members = [build_drafter(member, target) for member in config.members]
    # A lossy rule accepts tokens that the text does not contain, so the worth of a declined draft is unknown.
    if config.verify_cost and config.lossless:
        return PricedCascade(members, config.verify_cost, config.draft_cost)
    return Cascade(members)


def _check(config: SpeculativeConfig) -> None:
    if not isinstance(config.members, tuple) or len(config.members) < 2:
        raise ConfigError("members: a cascade needs at least two configurations")
    for member in config.members:
        if not isinstance(member, SpeculativeConfig) or member.kind in ("none", "cascade") or not member.lossless:
            raise ConfigError(f"members: {member!r} is not the configuration of a single lossless drafter")
    _check_costs("verify_cost", config.verify_cost, 0.1)
    _check_costs("draft_cost", config.draft_cost, 0.0)
    if config.draft_cost and not config.verify_cost:
        raise ConfigError("draft_cost: has no effect without verify_cost")
    if config.draft_cost and len(config.draft_cost) != len(config.members):
        raise ConfigError(f"draft_cost: {len(config.draft_cost)} numbers for {len(config.members)} members")


def _check_costs(name: str, costs: Any, least: float) -> None:
    if not isinstance(costs, tuple):
        raise ConfigError(f"{name}: {costs!r} is not a list of numbers")
    for cost in costs:
        check_number(name, cost, least, 1e6)


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

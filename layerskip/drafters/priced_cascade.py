"""Drafting by whichever of several drafters brings most for what its round takes, where it is known what that is.

All are asked that find their drafts without running a model, and of each draft as many tokens are kept as pay. One that runs
a model, or asks the target something, is asked where it promises more: what its rounds have brought, in this text and before
it, beside what they took. The time of a round could have been spent on others, so a round is worth the tokens that it brings
beyond those that come in such a time at the usual pace; nothing is drafted where nobody brings more. Who was declined for
long is asked again, as texts change.

This follows no paper; to choose by gains at the ratio reached so far, where a ratio of sums is to be as great as can be, is
Dinkelbach's method (Management Science 13, 1967).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..cache import KVCache
from ..draft import Draft
from ..sampling import Chooser
from ..tree import depth
from ..verify import Verdict
from .base import Context, Drafter, Finder
from .cascade import Members, like
from .expectation import Expectation

_KEPT = 0.99  # of what is known of the pace, from round to round
_LATELY = 128  # rounds of one member; older ones fade
_BEFORE = 16  # rounds of this text that what is known from before counts for
_PATIENCE = 128  # rounds on end that somebody is declined in
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
    """Asks its members for what is worth most; it knows from prompt to prompt what rounds brought, until told to forget.

    Args:
        members: as of any cascade.
        verify_cost: of verifying 1, 2, ... drafted tokens, in steps of plain decoding.
        draft_cost: what each member takes to draft a token of a chain, or a level of a tree, in such steps; 0 where empty.
    """

    def __init__(self, members: Sequence[Drafter], verify_cost: Sequence[float], draft_cost: Sequence[float] = ()) -> None:
        super().__init__(members)
        self._verify_cost = tuple(verify_cost)
        self._draft_cost = tuple(draft_cost) or (0.0,) * len(members)
        self._finders = [place for place, member in enumerate(members) if isinstance(member, Finder) and member.finds]
        self._others = [place for place in range(len(members)) if place not in self._finders]
        self._expectation = Expectation(by_token=True)
        self._begin_to_learn()

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Start every member."""
        super().start(prompt, cache, chooser)
        self._expectation.begin()
        # A text may be unlike those before it.
        self._here = {place: replace(known, rounds=min(known.rounds, _BEFORE)) for place, known in self._ever.items()}

    def draft(self, context: Context, limit: int) -> Draft:
        """Of what is found what pays best, or the most promising of the others; all learn the text."""
        self._follow(context)
        self._expectation.follow(context.tokens)
        self._drafted, self._asked, self._drafting = None, [], 0.0
        found, most = Draft.empty(context.last.device), 0.0
        for place in self._finders:
            draft = self.members[place].draft(context, limit)
            if draft.found:
                self._expectation.watch(like(place, draft), draft, len(context.tokens))
                size, gain = self._paying(place, draft)
                if gain > most:
                    self._drafted, found, most = place, draft.first(size), gain
        unsure: tuple[int, Draft] | None = None
        for place in self._promising(most):
            draft = self.members[place].draft(context, limit)
            self._asked.append(place)
            self._drafting += self._draft_cost[place] * _levels(draft)
            if not draft.tokens.shape[0]:
                continue
            if not draft.unsure:
                self._drafted, found = place, draft
                break
            unsure = unsure or (place, draft)
        if unsure is not None and self._drafted is None:
            self._drafted, found = unsure
        self._size = found.tokens.shape[0]
        return found

    def _promising(self, most: float) -> list[int]:
        """Places of members that do not find drafts, and promise more than what was found, the most promising first."""
        gains = {place: self._gain(place) for place in self._others}
        for place, gain in gains.items():
            self._declined[place] = 0 if gain > most else self._declined[place] + 1
            if self._declined[place] > _PATIENCE:
                self._declined[place], gains[place] = 0, math.inf
        return sorted((place for place in gains if gains[place] > most), key=lambda place: -gains[place])

    def _gain(self, place: int) -> float:
        """Tokens that a round of a member brings beyond those that come in its time at the usual pace."""
        known = self._here[place]
        return known.accepted - self._pace * (known.cost - 1)

    def _paying(self, place: int, draft: Draft) -> tuple[int, float]:
        """How many of a found draft's first tokens bring most beyond what verifying them takes, and what they do.

        Where no token is worth it, both are 0.
        """
        most, best = 0.0, 0
        for size, accepted in enumerate(self._expectation.expect_each(like(place, draft), draft), 1):
            if (gain := accepted - self._pace * (self._verifying(size) - 1)) > most:
                most, best = gain, size
        return best, most

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
        self._declined = dict.fromkeys(self._others, 0)  # in how many rounds on end

    def observe(self, verdict: Verdict) -> None:
        """Tell the member whose draft it was, and remember what the round brought."""
        super().observe(verdict)
        cost = self._drafting + self._verifying(self._size)
        self._tokens = _KEPT * self._tokens + verdict.accepted + 1
        self._steps = _KEPT * self._steps + cost
        for place in self._asked:  # who was asked in vain has brought nothing
            accepted = verdict.accepted if place == self._drafted else 0
            for known in (self._ever, self._here):
                known[place].add(accepted, cost)


def _levels(draft: Draft) -> int:
    """How many tokens a draft has in a row; one was asked for at least."""
    return max(1, draft.tokens.shape[0] if draft.parents is None else depth(draft.parents))

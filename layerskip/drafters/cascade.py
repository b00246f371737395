"""Drafting by the first of several drafters that has a proposal which is worth it.

What repeats is copied for nothing, what does not is drafted at a price: a lookup drafts where it finds something, and a
dearer drafter everywhere else. Two kinds of drafts wait until the others were asked, and are taken where none of them has a
better one: those that a stop rule ended behind its first token, and those out of the text of whose like fewer tokens are
accepted, lately, than of what another one drafts without running a model, whose passes would have to be paid for as well. Of
several that look up, which costs next to nothing, the one that promises more is taken.

Where it is known what verification costs, all are asked that find their drafts without running a model. Of each draft as
many tokens are kept as pay for themselves at the pace at which tokens come lately, and the one is taken that yields most for
what its round takes; where none pays, those are asked that run a model.

Whoever did not draft a round follows the text, and hears what the target said in the round, all the same. This follows no
paper.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..cache import KVCache
from ..config import ConfigError
from ..draft import Draft
from ..sampling import Chooser
from ..verify import Verdict
from .base import Context, Drafter, Follower, Learner, Reader, Said
from .expectation import LONG, Expectation
from .stopping import Stopped

_HOPE = 8.0  # accepted tokens of a draft that was looked up, before any is known
_KEPT = 0.99  # of what is known of the pace, from round to round
_TRIAL = 1.0  # of what a member behind drafts, so that it is tried where what was looked up is worth less


class Cascade:
    """Asks its members in order; it knows from prompt to prompt what became of their drafts, until it is told to forget.

    Args:
        members: drafters; which of them has a proposal, which is sure, and behind a match of how many tokens, may depend on
            the context alone, not on the tokens it would draw.
        verify_cost: of verifying 1, 2, ... drafted tokens, in steps of plain decoding; empty where it is not known.
    """

    learns = True

    def __init__(self, members: Sequence[Drafter], verify_cost: Sequence[float] = ()) -> None:
        self.members = tuple(members)
        self._costs = tuple(verify_cost)
        self.tree_tokens = max(member.tree_tokens for member in members)
        self._readers = [member for member in members if isinstance(member, Reader) and member.modules]
        if len({reader.modules for reader in self._readers}) > 1:
            raise ConfigError("members: they read different hidden states")
        self.modules = self._readers[0].modules if self._readers else ()
        self._followers = [member for member in members if isinstance(member, Follower)]
        # Places of members that draft for next to nothing, as no model runs.
        self._free = [place for place, member in enumerate(members) if not isinstance(member, (Reader, Stopped))]
        self._drafted: int | None = None  # the place of whose draft it was
        self._size: int | None = None  # of this round's draft, where costs are known and nothing but the target runs
        self._tokens, self._steps = 1.0, 1.0  # of such rounds, lately: what they brought, and what they took
        self._expectation = Expectation(by_token=bool(verify_cost))
        self._finders: set[int] = set()  # places of members that were seen to cost next to nothing to ask

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Start every member."""
        self._drafted = None
        self._expectation.begin()
        for member in self.members:
            member.start(prompt, cache, chooser)

    def draft(self, context: Context, limit: int) -> Draft:
        """The first draft worth taking, or the one worth most; whoever is not asked learns the text, too."""
        for follower in self._followers:
            follower.follow(context)
        self._expectation.follow(context.tokens)
        self._drafted, found, waits, most, ran = None, Draft.empty(context.last.device), True, 0.0, False
        for place, member in enumerate(self.members):
            if self._spared(place, found, waits):
                continue
            draft = member.draft(context, limit)
            ran = ran or place not in self._free
            if not draft.tokens.shape[0]:
                continue
            told = bool(self._costs and draft.found)
            if draft.match or told:
                self._finders.add(place)
                self._expectation.watch(_like(place, draft), draft, len(context.tokens))
            if told:
                size, worth = self._paying(place, draft)
                if worth > most:
                    self._drafted, found, most = place, draft.first(size), worth
                continue
            if waits:
                waits = draft.unsure or (draft.match > 0 and self._outdone(place, draft))
                taken = self._drafted is None or not waits
            else:
                assert self._drafted is not None
                expect = self._expectation.expect
                taken = expect(_like(place, draft)) > expect(_like(self._drafted, found), _HOPE)
            if taken:
                self._drafted, found = place, draft
        size = found.tokens.shape[0]
        self._size = size if self._costs and not ran and (found.found or not size) else None
        return found

    def _spared(self, place: int, found: Draft, waits: bool) -> bool:
        """Whether a member need not be asked, given the best draft of those before it."""
        if self._costs and found.found:
            return place not in self._finders
        if found.match and place not in self._free:
            return True  # what was looked up waits for who is as cheap
        return not waits and not (found.match and place in self._finders)

    def _paying(self, place: int, draft: Draft) -> tuple[int, float]:
        """How many of a found draft's first tokens are worth most beyond what verifying them takes, and what they yield.

        Whatever a round takes could have been spent on others, in which tokens come at the usual pace. Where no token is
        worth it, both are 0.
        """
        pace, most, best = self._tokens / self._steps, 0.0, (0, 0.0)
        for size, accepted in enumerate(self._expectation.expect_each(_like(place, draft), draft), 1):
            cost = self._cost(size)
            if (gain := accepted - pace * (cost - 1)) > most:
                most, best = gain, (size, (1 + accepted) / cost)
        return best

    def _cost(self, size: int) -> float:
        """What verifying so many tokens takes, in steps of plain decoding; what was not told continues what was."""
        if not size:
            return 1.0
        first, last, count = self._costs[0], self._costs[-1], len(self._costs)
        beyond = max(0.0, last - first) / max(1, count - 1) * (size - count)
        return self._costs[size - 1] if size <= count else last + beyond

    def _outdone(self, place: int, draft: Draft) -> bool:
        """Whether of a draft fewer tokens are accepted than a member behind that runs no model has had where it drafted.

        Of little evidence this says no: there is more hope for who is in front.
        """
        own = self._expectation.expect(_like(place, draft), _HOPE)
        return any(self._expectation.expect(other, _TRIAL) > own for other in self._free if other > place)

    def forget(self) -> None:
        """Forget what drafts were worth, and let every member forget."""
        self._expectation.forget()
        self._tokens, self._steps = 1.0, 1.0
        self._finders.clear()
        for member in self.members:
            if isinstance(member, Learner):
                member.forget()

    def read(self, features: Tensor) -> None:
        """Tell every member that reads."""
        for reader in self._readers:
            reader.read(features)

    def observe(self, verdict: Verdict) -> None:
        """Tell the member whose draft it was, and remember what became of it."""
        if self._size is not None:
            self._tokens = _KEPT * self._tokens + verdict.accepted + 1
            self._steps = _KEPT * self._steps + self._cost(self._size)
        if self._drafted is not None:
            self.members[self._drafted].observe(verdict)
            if not self._costs:
                self._expectation.add(self._drafted, verdict.accepted)
        self._size = None

    def hear(self, said: Said) -> None:
        """Tell every member."""
        for member in self.members:
            member.hear(said)


def _like(place: int, draft: Draft) -> tuple[int, int] | int:
    """What a draft is like: another of the same member, behind as long a match if it was looked up."""
    return (place, min(draft.match, LONG)) if draft.match else place

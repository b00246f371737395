"""Drafting by the first of several drafters that has a proposal which is worth it.

What repeats is copied for nothing, what does not is drafted at a price: a lookup drafts where it finds something, and a
dearer drafter everywhere else. Two kinds of drafts wait until the others were asked, and are taken where none of them has a
better one: those that a stop rule ended behind its first token, and those out of the text of whose like fewer tokens are
accepted, lately, than of what another one drafts without running a model, whose passes would have to be paid for as well. Of
several that look up, which costs next to nothing, the one that promises more is taken. Where it is known what verification
costs, drafts count by the tokens that a round with them yields for what it takes. Of one that was had for nothing as many
tokens are verified as pay for themselves at the pace at which tokens come lately, and it is declined unless it promises
clearly more than a step of plain decoding. Whoever did not draft a round follows the text, and hears what the target said in
the round, all the same. This follows no paper.
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
from .expectation import Expectation
from .stopping import Stopped

_LONG = 8  # tokens of a match, of which more say no more
_HOPE = 8.0  # accepted tokens of a draft that was looked up, before any is known
_LEAST = 1.1  # tokens for what a step of plain decoding takes, as means err and drafting takes a little as well
_PACE = 0.99  # of what is known of the pace is still known a round later
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
        self._scored = False  # whether the text will tell what that was worth
        self._expectation = Expectation()
        self._tokens, self._steps = 1.0, 1.0  # lately, of rounds that took a step of plain decoding and what verifying adds
        self._size: int | None = None  # of this round's draft, if it is such a round
        self._sizes: dict[int, int] = {}  # of the last draft of who drafted any
        self._lookups: set[int] = set()  # places of members that were seen to look up, who cost next to nothing to ask

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Start every member."""
        self._drafted = None
        self._expectation.begin()
        for member in self.members:
            member.start(prompt, cache, chooser)

    def draft(self, context: Context, limit: int) -> Draft:
        """The first draft worth taking, else the first that is not declined; whoever is not asked learns the text, too."""
        for follower in self._followers:
            follower.follow(context)
        self._expectation.follow(context.tokens)
        self._drafted, found, waits = None, Draft.empty(context.last.device), True
        for place, member in enumerate(self.members):
            if not waits and not (found.match and place in self._lookups):
                continue
            if found.match and place not in self._free:
                continue  # what was looked up waits for who is as cheap
            draft = member.draft(context, limit)
            if not draft.tokens.shape[0]:
                continue
            if draft.match:
                self._lookups.add(place)
            if draft.match or (draft.found and self._costs):
                size = self._paying(place, draft)
                self._expectation.watch(_like(place, draft), draft, size, len(context.tokens))
                if not size:
                    continue
                draft = draft.first(size)
            self._sizes[place] = draft.tokens.shape[0]
            if self._costs and draft.found and self._worth(place, draft) < _LEAST:
                continue
            if waits:
                waits = draft.unsure or (draft.match > 0 and self._outdone(place, draft))
                taken = self._drafted is None or (not waits and self._outdoes(place, draft, found))
                waits = waits or not taken
            else:
                assert self._drafted is not None
                taken = self._worth(place, draft, 0.0) > self._worth(self._drafted, found)
            if taken:
                self._drafted, found = place, draft
        self._scored = bool(self._costs and found.found and not found.match)
        size = found.tokens.shape[0]
        self._size = size if found.found or not size else None
        return found

    def _paying(self, place: int, draft: Draft) -> int:
        """How many of a found draft's first tokens are worth most beyond what verifying them takes; 0 where none are.

        Whatever a round takes could have been spent on other rounds, in which tokens come at the usual pace.
        """
        if not self._costs:
            return draft.tokens.shape[0]
        pace, best, most = self._tokens / self._steps, 0, 0.0
        for size, accepted in enumerate(self._expectation.expect_each(_like(place, draft), draft), 1):
            if (found := accepted - pace * (self._cost(size) - 1)) > most:
                best, most = size, found
        return best

    def _worth(self, place: int, draft: Draft, hope: float | None = None) -> float:
        """What a round with a member's draft is expected to yield."""
        if hope is None:
            hope = _HOPE if draft.match else _TRIAL
        size = draft.tokens.shape[0]
        accepted = self._expectation.expect(_like(place, draft), min(hope, size) if self._costs else hope)
        return self._yield(accepted, size)

    def _yield(self, accepted: float, size: int) -> float:
        """Tokens, for each step of plain decoding that verifying a draft of some size takes, as far as that is known."""
        return (1 + min(accepted, size)) / self._cost(size) if self._costs else 1 + accepted

    def _cost(self, size: int) -> float:
        """What verifying so many tokens takes, in steps of plain decoding; what was not told continues what was."""
        if not size:
            return 1.0
        first, last, count = self._costs[0], self._costs[-1], len(self._costs)
        beyond = max(0.0, last - first) / max(1, count - 1) * (size - count)
        return self._costs[size - 1] if size <= count else last + beyond

    def _outdone(self, place: int, draft: Draft) -> bool:
        """Whether a draft is worth less than what a member behind that runs no model has drafted where it did.

        Of little evidence this says no: there is more hope for who is in front.
        """
        worth = self._worth(place, draft)
        behind = [other for other in self._free if other > place]
        yields = (self._yield(self._expectation.expect(other, _TRIAL), self._sizes.get(other, 1)) for other in behind)
        return any(found > worth for found in yields)

    def _outdoes(self, place: int, draft: Draft, waiting: Draft) -> bool:
        """Whether a draft is better than one that waits for it, as far as both are told by what they cost."""
        assert self._drafted is not None
        told = self._costs and draft.found and waiting.found
        return not told or self._worth(place, draft) > self._worth(self._drafted, waiting)

    def forget(self) -> None:
        """Forget what drafts were worth, and let every member forget."""
        self._expectation.forget()
        self._tokens, self._steps = 1.0, 1.0
        self._sizes.clear()
        self._lookups.clear()
        for member in self.members:
            if isinstance(member, Learner):
                member.forget()

    def read(self, features: Tensor) -> None:
        """Tell every member that reads."""
        for reader in self._readers:
            reader.read(features)

    def observe(self, verdict: Verdict) -> None:
        """Tell the member whose draft it was, and remember what became of it."""
        if self._costs and self._size is not None:
            self._tokens = _PACE * self._tokens + verdict.accepted + 1
            self._steps = _PACE * self._steps + self._cost(self._size)
        self._size = None
        if self._drafted is not None:
            self.members[self._drafted].observe(verdict)
            if not self._scored:
                self._expectation.add(self._drafted, verdict.accepted)

    def hear(self, said: Said) -> None:
        """Tell every member."""
        for member in self.members:
            member.hear(said)


def _like(place: int, draft: Draft) -> tuple[int, int] | int:
    """What a draft is like: another of the same member, behind as long a match if it was looked up."""
    return (place, min(draft.match, _LONG)) if draft.match else place

"""Drafting by the first of several drafters that has a proposal which is worth it.

What repeats is copied for nothing, what does not is drafted at a price: a lookup drafts where it finds something, and a
dearer drafter everywhere else. Two kinds of drafts wait until the others were asked, and are taken where none of them has a
better one: those that a stop rule ended behind its first token, and those out of the text of whose like fewer tokens are
accepted, lately, than of what another one drafts without running a model, whose passes would have to be paid for as well. Of
several that look up, which costs next to nothing, the one that promises more is taken. Where it is known what drafts and
their verification cost, :mod:`layerskip.drafters.priced_cascade` knows better than an order.

Whoever did not draft a round follows the text, and hears what the target said in the round, all the same. This follows no
paper.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from layerskip.config import ConfigError
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, Follower, Learner, Reader, Said
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.stopping import Stopped
from layerskip.decoding.verify import Verdict
from layerskip.drafters.expected_acceptance import LONG, Expectation
from layerskip.models.cache import KVCache

_HOPE = 8.0  # accepted tokens of a draft that was looked up, before any is known
_TRIAL = 1.0  # of what a member behind drafts, so that it is tried where what was looked up is worth less


class Members:
    """Several drafters, one of which drafts a round, while all learn from it.

    Args:
        members: drafters; which of them has a proposal, which is sure, and behind a match of how many tokens, may depend on
            the context alone, not on the tokens it would draw.
    """

    learns = True

    def __init__(self, members: Sequence[Drafter]) -> None:
        self.members = tuple(members)
        self.tree_tokens = max(member.tree_tokens for member in members)
        self._readers = [member for member in members if isinstance(member, Reader) and member.modules]
        if len({reader.modules for reader in self._readers}) > 1:
            raise ConfigError("members: they read different hidden states")
        self.modules = self._readers[0].modules if self._readers else ()
        self._followers = [member for member in members if isinstance(member, Follower)]
        self._drafted: int | None = None  # the place of whose draft it was

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Start every member."""
        self._drafted = None
        for member in self.members:
            member.start(prompt, cache, chooser)

    def forget(self) -> None:
        """Let every member forget."""
        for member in self.members:
            if isinstance(member, Learner):
                member.forget()

    def read(self, features: Tensor) -> None:
        """Tell every member that reads."""
        for reader in self._readers:
            reader.read(features)

    def observe(self, verdict: Verdict) -> None:
        """Tell the member whose draft it was."""
        if self._drafted is not None:
            self.members[self._drafted].observe(verdict)

    def hear(self, said: Said) -> None:
        """Tell every member."""
        for member in self.members:
            member.hear(said)

    def _follow(self, context: Context) -> None:
        """Let whoever learns from the text learn it, asked or not."""
        for follower in self._followers:
            follower.follow(context)


class Cascade(Members):
    """Asks its members in order; it knows from prompt to prompt what became of their drafts, until it is told to forget."""

    def __init__(self, members: Sequence[Drafter]) -> None:
        super().__init__(members)
        # Places of members that draft for next to nothing, as no model runs.
        self._free = [place for place, member in enumerate(members) if not isinstance(member, (Reader, Stopped))]
        self._expectation = Expectation()
        self._looked_up: set[int] = set()  # places of members that were seen to cost next to nothing to ask

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Start every member."""
        super().start(prompt, cache, chooser)
        self._expectation.begin()

    def draft(self, context: Context, limit: int) -> Draft:
        """The first draft worth taking; whoever is not asked learns the text, too."""
        self._follow(context)
        self._expectation.follow(context.tokens)
        self._drafted, found, waits = None, Draft.empty(context.last.device), True
        for place, member in enumerate(self.members):
            if self._spared(place, found, waits):
                continue
            draft = member.draft(context, limit)
            if not draft.tokens.shape[0]:
                continue
            if draft.match:
                self._looked_up.add(place)
                self._expectation.watch(like(place, draft), draft, len(context.tokens))
            if waits:
                waits = draft.unsure or (draft.match > 0 and self._outdone(place, draft))
                taken = self._drafted is None or not waits
            else:
                assert self._drafted is not None
                expect = self._expectation.expect
                taken = expect(like(place, draft)) > expect(like(self._drafted, found), _HOPE)
            if taken:
                self._drafted, found = place, draft
        return found

    def _spared(self, place: int, found: Draft, waits: bool) -> bool:
        """Whether a member need not be asked, given the best draft of those before it."""
        if found.match and place not in self._free:
            return True  # what was looked up waits for who is as cheap
        return not waits and not (found.match and place in self._looked_up)

    def _outdone(self, place: int, draft: Draft) -> bool:
        """Whether of a draft fewer tokens are accepted than a member behind that runs no model has had where it drafted.

        Of little evidence this says no: there is more hope for who is in front.
        """
        own = self._expectation.expect(like(place, draft), _HOPE)
        return any(self._expectation.expect(other, _TRIAL) > own for other in self._free if other > place)

    def forget(self) -> None:
        """Forget what drafts were worth, and let every member forget."""
        super().forget()
        self._expectation.forget()
        self._looked_up.clear()

    def observe(self, verdict: Verdict) -> None:
        """Tell the member whose draft it was, and remember what became of it."""
        super().observe(verdict)
        if self._drafted is not None:
            self._expectation.add(self._drafted, verdict.accepted)


def like(place: int, draft: Draft) -> tuple[int, int] | int:
    """What a member's draft is like: another of the same member, behind as long a match if it was looked up."""
    return (place, min(draft.match, LONG)) if draft.match else place

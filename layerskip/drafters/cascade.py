"""Drafting by the first of several drafters that has a proposal which is worth it.

What repeats is copied for nothing, what does not is drafted at a price: a lookup drafts where it finds something, and a
dearer drafter everywhere else. Two kinds of drafts wait until the others were asked, and are taken where none of them has a
better one: those that a stop rule ended behind its first token, and those out of the text of whose like fewer tokens are
accepted, lately, than of what one of the others drafts. Whoever did not draft a round follows the text, and hears what the
target said in the round, all the same. This follows no paper.
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


class Cascade:
    """Asks its members in order; it knows from prompt to prompt what became of their drafts, until it is told to forget.

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
        self._expectation = Expectation()

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Start every member."""
        self._drafted = None
        self._expectation.begin()
        for member in self.members:
            member.start(prompt, cache, chooser)

    def draft(self, context: Context, limit: int) -> Draft:
        """The first draft worth taking, else the first that is not empty; who is not asked learns the text all the same."""
        for follower in self._followers:
            follower.follow(context)
        self._expectation.follow(context.tokens)
        self._drafted, found = None, Draft.empty(context.last.device)
        for place, member in enumerate(self.members):
            draft = member.draft(context, limit)
            if not draft.tokens.shape[0]:
                continue
            if draft.match:
                self._expectation.watch((place, draft.match), draft, len(context.tokens))
            waits = draft.unsure or self._outdone(place, draft.match)
            if self._drafted is None or not waits:
                self._drafted, found = place, draft
            if not waits:
                break
        return found

    def _outdone(self, place: int, match: int) -> bool:
        """Whether of a member's drafts behind such a match fewer tokens are accepted than of what one behind it drafts."""
        expected = self._expectation.expect((place, match)) if match else None
        others = (self._expectation.expect(behind) for behind in range(place + 1, len(self.members)))
        return expected is not None and any(other is not None and other > expected for other in others)

    def forget(self) -> None:
        """Forget what drafts were worth, and let every member forget."""
        self._expectation.forget()
        for member in self.members:
            if isinstance(member, Learner):
                member.forget()

    def read(self, features: Tensor) -> None:
        """Tell every member that reads."""
        for reader in self._readers:
            reader.read(features)

    def observe(self, verdict: Verdict) -> None:
        """Tell the member whose draft it was, and remember what became of it."""
        if self._drafted is not None:
            self.members[self._drafted].observe(verdict)
            self._expectation.add(self._drafted, verdict.accepted)

    def hear(self, said: Said) -> None:
        """Tell every member."""
        for member in self.members:
            member.hear(said)

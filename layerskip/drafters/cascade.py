"""Drafting by the first of several drafters that has a proposal which it is sure of.

What repeats is copied for nothing, what does not is drafted at a price: a lookup drafts where it finds something, and a
dearer drafter everywhere else. A draft that a stop rule ended behind its first token waits until the others were asked: it
is taken where none of them is surer. Whoever did not draft a round follows the text, and hears what the target said in the
round, all the same. This follows no paper.
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


class Cascade:
    """Asks its members in order.

    Args:
        members: drafters; which of them has a proposal, and which is sure, may depend on the context alone, not on the
            tokens it would draw.
    """

    def __init__(self, members: Sequence[Drafter]) -> None:
        self.members = tuple(members)
        self.tree_tokens = max(member.tree_tokens for member in members)
        self._readers = [member for member in members if isinstance(member, Reader) and member.modules]
        if len({reader.modules for reader in self._readers}) > 1:
            raise ConfigError("members: they read different hidden states")
        self.modules = self._readers[0].modules if self._readers else ()
        self._followers = [member for member in members if isinstance(member, Follower)]
        self._drafted: Drafter | None = None

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Start every member."""
        self._drafted = None
        for member in self.members:
            member.start(prompt, cache, chooser)

    def draft(self, context: Context, limit: int) -> Draft:
        """The first draft that is sure, else the first that is not empty; who is not asked learns the text all the same."""
        for follower in self._followers:
            follower.follow(context)
        self._drafted, found = None, Draft.empty(context.last.device)
        for member in self.members:
            draft = member.draft(context, limit)
            if draft.tokens.shape[0] and (self._drafted is None or not draft.unsure):
                self._drafted, found = member, draft
                if not draft.unsure:
                    break
        return found

    @property
    def learns(self) -> bool:
        """Whether any member does."""
        return any(isinstance(member, Learner) and member.learns for member in self.members)

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
            self._drafted.observe(verdict)

    def hear(self, said: Said) -> None:
        """Tell every member."""
        for member in self.members:
            member.hear(said)

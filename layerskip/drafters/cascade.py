"""A cascade without costs: the first of several drafters with a worthwhile proposal drafts the round.

Repeated text is copied by a lookup, which costs next to nothing; a more expensive drafter drafts the rest. Two kinds of
drafts are provisional, which means that the other members draft, too, before they are taken. One is a draft that a stop rule
ended after its first token. The other is a lookup with a lower estimated acceptance than the recent drafts of a later member
that runs no model. Of several lookups the one with the higher estimate is taken. If the costs of drafting and verification
are known, :mod:`layerskip.drafters.priced_cascade` decides better than this order.

All members follow the text and observe the target's logits in every round. This follows no paper.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from layerskip.config import ConfigError
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import (
    Context,
    ContextFollower,
    CrossPromptState,
    Drafter,
    FeatureReader,
    LateRead,
    VerifyOutput,
)
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.stopping import StopRuleDrafter
from layerskip.decoding.verify import Verdict
from layerskip.drafters.expected_acceptance import MAX_MATCH, AcceptanceEstimates
from layerskip.models.cache import KVCache

_LOOKUP_PRIOR = 8.0  # prior accepted tokens of a lookup
_LATER_PRIOR = 1.0  # prior accepted tokens of a later member, so that it is tried if lookups are worth less


class CascadeBase:
    """Several drafters, one of which drafts a round; all of them learn from it.

    Args:
        members: drafters. Which member has a proposal, whether a stop rule ended it, and the length of its match must depend
            on the context only, not on drawn tokens.
    """

    keeps_state = True

    def __init__(self, members: Sequence[Drafter]) -> None:
        self.members = tuple(members)
        self.tree_tokens = max(member.tree_tokens for member in members)
        self._readers = [member for member in members if isinstance(member, FeatureReader) and member.modules]
        if len({reader.modules for reader in self._readers}) > 1:
            raise ConfigError("members: they read different hidden states")
        self.modules = self._readers[0].modules if self._readers else ()
        self._followers = [member for member in members if isinstance(member, ContextFollower)]
        self._drafted: int | None = None  # the index of the member whose draft is verified

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Start every member."""
        self._drafted = None
        for member in self.members:
            member.start(prompt, cache, chooser)

    def reset_state(self) -> None:
        """Reset every member."""
        for member in self.members:
            if isinstance(member, CrossPromptState):
                member.reset_state()

    def observe_features(self, features: Tensor) -> None:
        """Pass the hidden states to every member that reads them."""
        for reader in self._readers:
            reader.observe_features(features)

    def observe(self, verdict: Verdict) -> None:
        """Pass the verdict to the member that drafted."""
        if self._drafted is not None:
            self.members[self._drafted].observe(verdict)

    def observe_logits(self, output: VerifyOutput) -> Sequence[LateRead]:
        """Return what the members want to read."""
        return [late for member in self.members for late in member.observe_logits(output)]

    def _follow(self, context: Context) -> None:
        for follower in self._followers:
            follower.follow(context)


class Cascade(CascadeBase):
    """A cascade that tries its members in order. Its estimates of their acceptance last from prompt to prompt.

    A tree whose shape only the device knows counts as a proposal, although it may turn out to be empty.
    """

    def __init__(self, members: Sequence[Drafter]) -> None:
        super().__init__(members)
        model_drafters = (FeatureReader, StopRuleDrafter)
        self._model_free = [index for index, member in enumerate(members) if not isinstance(member, model_drafters)]
        self._estimates = AcceptanceEstimates()
        self._lookups: set[int] = set()  # the members that have made a lookup draft

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Start every member."""
        super().start(prompt, cache, chooser)
        self._estimates.start_text()

    def draft(self, context: Context, limit: int) -> Draft:
        """Return the first draft worth taking; members that do not draft follow the text, too."""
        self._follow(context)
        self._estimates.update(context.tokens)
        self._drafted, best, provisional = None, Draft.empty(context.last.device), True
        for index, member in enumerate(self.members):
            if self._skips(index, best, provisional):
                continue
            draft = member.draft(context, limit)
            if not draft.tokens.shape[0]:
                continue
            if draft.match_length:
                self._lookups.add(index)
                self._estimates.track(draft_group(index, draft), draft, len(context.tokens))
            if provisional:
                provisional = draft.stopped_at_first or (draft.match_length > 0 and self._is_outdone(index, draft))
                taken = self._drafted is None or not provisional
            else:
                assert self._drafted is not None
                own = self._estimates.mean(draft_group(index, draft))
                taken = own > self._estimates.mean(draft_group(self._drafted, best), _LOOKUP_PRIOR)
            if taken:
                self._drafted, best = index, draft
        return best

    def _skips(self, index: int, best: Draft, provisional: bool) -> bool:
        """Return whether a member need not draft, given the best draft of those before it."""
        if best.match_length and index not in self._model_free:
            return True  # a lookup yields only to members that run no model
        return not provisional and not (best.match_length and index in self._lookups)

    def _is_outdone(self, index: int, draft: Draft) -> bool:
        """Return whether a later member that runs no model has a higher estimated acceptance than this draft.

        With little evidence this is False, as the priors favour the earlier member.
        """
        own = self._estimates.mean(draft_group(index, draft), _LOOKUP_PRIOR)
        return any(self._estimates.mean(other, _LATER_PRIOR) > own for other in self._model_free if other > index)

    def reset_state(self) -> None:
        """Drop the estimates and reset every member."""
        super().reset_state()
        self._estimates.reset()
        self._lookups.clear()

    def observe(self, verdict: Verdict) -> None:
        """Pass the verdict to the member that drafted, and update its estimate."""
        super().observe(verdict)
        if self._drafted is not None:
            self._estimates.add(self._drafted, verdict.accepted)


def draft_group(index: int, draft: Draft) -> tuple[int, int] | int:
    """Return the group whose acceptance a draft shares: its member and, for a lookup, the length of its match."""
    return (index, min(draft.match_length, MAX_MATCH)) if draft.match_length else index

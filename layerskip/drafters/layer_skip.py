"""Drafting with the target itself, some of its sub-layers skipped.

Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding (arXiv 2309.08168). The draft runs
on the target's own cache: it reads the verified prefix, so it needs no prefill and no memory, and what it writes behind
that prefix is overwritten by verification. With siblings it drafts trees, as SWIFT does (arXiv 2410.06916):
:mod:`layerskip.drafters.fan`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..cache import KVCache
from ..config import StopRule
from ..draft import Draft
from ..draft_head import DraftHead
from ..sampling import Chooser
from ..verify import Verdict
from .base import Context, Said
from .chain import draft_chain
from .fan import Fan
from .stopping import Stopped, Stopper


class LayerSkip(Stopped):
    """Drafts through a view of the target.

    Args:
        view: the target with sub-layers skipped, as :func:`layerskip.view.skip_view` makes it.
        draft_length: the most tokens per round.
        stop: when to stop before that.
        siblings: so many other tokens may be verified beside each drafted one; 0 drafts chains.
        least_probability: that the draft must give to a sibling.
        head: that the view was narrowed to, if it was.
    """

    def __init__(
        self,
        view: nn.Module,
        draft_length: int,
        stop: StopRule,
        siblings: int = 0,
        least_probability: float = 0.05,
        head: DraftHead | None = None,
    ) -> None:
        self.view = view
        self.draft_length = draft_length
        self.stopper = Stopper(stop)
        self.siblings, self.least_probability = siblings, least_probability
        self._head = head
        self.tree_tokens = draft_length * (1 + siblings) if siblings else 0
        self._depth = 0  # of the last draft

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Take the target's cache; there is nothing to prefill."""
        self._cache, self._chooser = cache, chooser
        if self._head is not None:
            self._head.begin()
        self.stopper.start()

    def draft(self, context: Context, limit: int) -> Draft:
        """Draft on the target's cache, then rewind it."""
        verified = self._cache.length
        drafted = None if self._head is None else self._head.follow(context.tokens)
        fan = Fan(self.siblings, self.least_probability, self._chooser, drafted) if self.siblings else None
        limit = min(limit, self.draft_length)
        try:
            return draft_chain(self.view, self._cache, context.last, limit, self._chooser, self.stopper, fan, drafted)
        finally:
            self._depth = self._cache.length - verified
            self._cache.length = verified

    def observe(self, verdict: Verdict) -> None:
        """Adapt the stop rule."""
        self.stopper.observe(self._depth, verdict.accepted)

    def hear(self, said: Said) -> None:
        """Nothing to learn."""

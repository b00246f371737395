"""Drafting with the target itself, some of its sub-layers skipped.

Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding (arXiv 2309.08168). The draft runs
on the target's own cache: it reads the verified prefix, so it needs neither a prefill nor memory of its own, and
verification overwrites what it writes after that prefix. With siblings it drafts trees like SWIFT (arXiv 2410.06916), see
:mod:`layerskip.drafters.chain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from torch import nn

from layerskip.config import ConfigError, Method, SpeculativeConfig, StopRule, shared
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.stopping import Stopper, StopRuleDrafter
from layerskip.decoding.tree_growth import reads_while_growing
from layerskip.decoding.verify import Verdict
from layerskip.drafters.chain import SiblingCollector, draft_chain, reduce_output
from layerskip.mask import MaskError, SkipMask
from layerskip.models.cache import KVCache
from layerskip.models.draft_head import DraftHead
from layerskip.models.skip_view import cached_skip_view, skip_view
from layerskip.models.target import Target


def _label(config: SpeculativeConfig) -> str:
    parts = [config.mask or "nothing skipped"]
    parts += [PurePath(config.draft_head).name] if config.draft_head else []
    parts += [f"{config.siblings} siblings from {config.min_token_prob:g}"] if config.siblings else []
    return ", ".join(parts)


class LayerSkip(StopRuleDrafter):
    """A drafter through a view of the target.

    Args:
        view: the target without the skipped sub-layers, from :func:`layerskip.models.skip_view.skip_view`.
    """

    method = Method(
        "layer_skip",
        (
            shared("mask"),
            shared("draft_head"),
            shared("num_speculative_tokens", range=(1, 8)),
            shared("stop", first=StopRule("adaptive")),
            shared("siblings", range=(0, 2), chains=0, omitted=True),
            shared(
                "min_token_prob",
                range=(0.005, 0.5),
                used=lambda config: config.siblings > 0,
                meaning="the least probability of a sibling",
            ),
        ),
        source="the target with sub-layers skipped",
        rank=5,
        color="#1f77b4",
        label=_label,
        benchmark={"mask": "layers:15-29", "num_speculative_tokens": 1},
        engine_method="draft_model",
    )

    def __init__(
        self,
        view: nn.Module,
        num_speculative_tokens: int,
        stop: StopRule,
        siblings: int = 0,
        min_token_prob: float = 0.05,
        head: DraftHead | None = None,
    ) -> None:
        self.view, self.num_speculative_tokens, self._head = view, num_speculative_tokens, head
        self.stopper, self.siblings, self.min_token_prob = Stopper(stop), siblings, min_token_prob
        self.tree_tokens = num_speculative_tokens * (1 + siblings) if siblings else 0
        self._depth = 0  # of the last draft

    @classmethod
    def build(cls, config: SpeculativeConfig, target: Target) -> LayerSkip:
        try:
            mask = SkipMask.parse(config.mask, target.layers)
        except MaskError as error:
            raise ConfigError(str(error)) from None
        # A view with another output layer is not shared.
        view = (skip_view if config.draft_head else cached_skip_view)(target.model, mask)
        head = reduce_output(view, target.model, config, target)
        return cls(view, config.num_speculative_tokens, config.stop, config.siblings, config.min_token_prob, head)

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        self._cache, self._chooser = cache, chooser
        if self._head is not None:
            self._head.begin()
        self.stopper.start()

    def draft(self, context: Context, limit: int) -> Draft:
        """Draft on the target's cache, then restore its length."""
        verified = self._cache.length
        vocabulary = None if self._head is None else self._head.follow(context.tokens)
        siblings = None
        if self.siblings:
            reads = reads_while_growing(self._cache, context.last.device)
            siblings = SiblingCollector(self.siblings, self.min_token_prob, context.last, reads, vocabulary)
        limit = min(limit, self.num_speculative_tokens)
        try:
            return draft_chain(
                self.view, self._cache, context.last, limit, self._chooser, self.stopper, siblings, vocabulary
            )
        finally:
            self._depth = self._cache.length - verified
            self._cache.length = verified

    def observe(self, verdict: Verdict) -> None:
        self.stopper.observe(self._depth, verdict.accepted)

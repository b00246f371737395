"""Drafting with the target itself, some of its sub-layers skipped.

Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding (arXiv 2309.08168). The draft runs
on the target's own cache: it reads the verified prefix, so it needs neither a prefill nor memory of its own, and
verification overwrites what it writes after that prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from layerskip.config import ConfigError, Method, SpeculativeConfig, StopRule, shared
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.stopping import Stopper, StopRuleDrafter
from layerskip.drafters.chain import draft_chain
from layerskip.mask import MaskError, SkipMask
from layerskip.models.cache import KVCache
from layerskip.models.skip_view import cached_skip_view
from layerskip.models.target import Target


class LayerSkip(StopRuleDrafter):
    """A drafter through a view of the target, such as one from :func:`layerskip.models.skip_view.skip_view`."""

    method = Method(
        "layer_skip",
        (
            shared("mask"),
            shared("num_speculative_tokens", range=(1, 8)),
            shared("stop", first=StopRule("adaptive")),
        ),
        source="the target with sub-layers skipped",
        rank=5,
        color="#1f77b4",
        label=lambda config: config.mask or "nothing skipped",
        benchmark={"mask": "layers:15-29", "num_speculative_tokens": 1},
        engine_method="draft_model",
    )

    def __init__(self, view: nn.Module, num_speculative_tokens: int, stop: StopRule) -> None:
        self.view, self.num_speculative_tokens, self.stopper = view, num_speculative_tokens, Stopper(stop)

    @classmethod
    def build(cls, config: SpeculativeConfig, target: Target) -> LayerSkip:
        try:
            mask = SkipMask.parse(config.mask, target.layers)
        except MaskError as error:
            raise ConfigError(str(error)) from None
        return cls(cached_skip_view(target.model, mask), config.num_speculative_tokens, config.stop)

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        self._cache, self._chooser = cache, chooser

    def draft(self, context: Context, limit: int) -> Draft:
        """Draft on the target's cache, then restore its length."""
        verified = self._cache.length
        limit = min(limit, self.num_speculative_tokens)
        try:
            return draft_chain(self.view, self._cache, context.last, limit, self._chooser, self.stopper)
        finally:
            self._cache.length = verified

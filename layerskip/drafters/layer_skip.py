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
from layerskip.draft_plan import DraftPlan, PlanError, is_mask
from layerskip.drafters.chain import draft_chain
from layerskip.models.cache import KVCache
from layerskip.models.skip_view import cached_skip_view
from layerskip.models.target import Target


def _check(config: SpeculativeConfig) -> None:
    if not is_mask(config.mask):
        raise ConfigError(f"mask: {config.mask!r} reads fewer bits; that is a value of weights, of the method quantized")


_SINKS = 4
"""The first positions that a window keeps, because most heads attend to them (StreamingLLM, arXiv 2309.17453)."""


class LayerSkip(StopRuleDrafter):
    """A drafter through a view of the target, such as one from :func:`layerskip.models.skip_view.skip_view`."""

    method = Method(
        "layer_skip",
        (
            shared("mask"),
            shared("num_speculative_tokens", range=(1, 8)),
            shared("stop", first=StopRule("adaptive")),
            shared("draft_window"),
        ),
        source="the target with sub-layers skipped",
        rank=5,
        color="#1f77b4",
        label=lambda config: config.mask or "nothing skipped",
        check=_check,
        benchmark={"mask": "layers:15-29", "num_speculative_tokens": 1, "draft_window": 0},
        engine_method="draft_model",
    )

    def __init__(self, view: nn.Module, num_speculative_tokens: int, stop: StopRule, window: int = 0) -> None:
        self.view, self.num_speculative_tokens, self.stopper = view, num_speculative_tokens, Stopper(stop)
        self.window = window

    @classmethod
    def build(cls, config: SpeculativeConfig, target: Target) -> LayerSkip:
        try:
            plan = cls.plan(config, target.layers)
        except PlanError as error:
            field = "mask" if "mask" in cls.method else "weights"
            raise ConfigError(f"{field}: {str(error).removeprefix('mask: ')}") from None
        view = cached_skip_view(target.model, plan)
        return cls(view, config.num_speculative_tokens, config.stop, config.draft_window)

    @classmethod
    def plan(cls, config: SpeculativeConfig, layers: int) -> DraftPlan:
        """Return what a draft of a configuration skips and reads; a :class:`PlanError` if the target has other layers."""
        return DraftPlan.parse(config.mask, layers)

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        self._cache, self._chooser = cache, chooser
        self._seen = KVCache(len(cache.layers), _SINKS + self.window + self.num_speculative_tokens) if self.window else None

    def draft(self, context: Context, limit: int) -> Draft:
        """Draft on the target's cache, then restore its length; or on a copy of what the window shows of it."""
        verified = self._cache.length
        limit = min(limit, self.num_speculative_tokens)
        if self._seen is not None and verified > _SINKS + self.window:
            self._seen.copy_ends(self._cache, _SINKS, self.window)
            left_out = verified - self._seen.length
            return draft_chain(self.view, self._seen, context.last, limit, self._chooser, self.stopper, offset=left_out)
        try:
            return draft_chain(self.view, self._cache, context.last, limit, self._chooser, self.stopper)
        finally:
            self._cache.length = verified

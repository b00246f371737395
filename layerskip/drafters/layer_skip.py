"""Drafting with the target itself, some of its sub-layers skipped.

Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding (arXiv 2309.08168). The draft runs
on the target's own cache: it reads the verified prefix, so it needs neither a prefill nor memory of its own, and
verification overwrites what it writes after that prefix.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from layerskip.config import ConfigError, Method, SpeculativeConfig, StopRule, shared
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.stopping import Stopper, StopRuleDrafter
from layerskip.decoding.verify import Verdict
from layerskip.draft_plan import DraftPlan, PlanError
from layerskip.drafters.chain import draft_chain
from layerskip.models.architecture import UnsupportedModel
from layerskip.models.cache import KVCache
from layerskip.models.skip_view import cached_skip_view
from layerskip.models.target import Target

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
            shared("siblings"),
        ),
        source="the target with sub-layers skipped",
        rank=5,
        color="#1f77b4",
        label=lambda config: config.mask or "nothing skipped",
        benchmark={"mask": "layers:15-29", "num_speculative_tokens": 1},
        engine_method="draft_model",
    )

    def __init__(
        self, view: nn.Module, num_speculative_tokens: int, stop: StopRule, window: int = 0, siblings: int = 0
    ) -> None:
        self.view, self.num_speculative_tokens, self.stopper = view, num_speculative_tokens, Stopper(stop)
        self.window, self.siblings = window, siblings
        self.tree_tokens = num_speculative_tokens * (1 + siblings) if siblings else 0

    @classmethod
    def build(cls, config: SpeculativeConfig, target: Target) -> LayerSkip:
        try:
            plan = DraftPlan.parse(config.plan, target.layers)
        except PlanError as error:
            raise ConfigError(f"{cls.method.plan_field}: {error}") from None
        if config.draft_window and "position_ids" not in inspect.signature(type(target.model).forward).parameters:
            raise UnsupportedModel(f"draft_window: {target.architecture} takes no positions")
        view = cached_skip_view(target.model, plan)
        return cls(view, config.num_speculative_tokens, config.stop, config.draft_window, config.siblings)

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        self._cache, self._chooser = cache, chooser
        self._seen = KVCache(len(cache.layers), _SINKS + self.window + self.num_speculative_tokens) if self.window else None

    def draft(self, context: Context, limit: int) -> Draft:
        """Draft on the target's cache, then restore its length; or on a copy of what the window shows of it."""
        verified = self._cache.length
        limit = min(limit, self.num_speculative_tokens)
        rules: Any = {"chooser": self._chooser, "stopper": self.stopper, "siblings": self.siblings}
        if self._seen is not None and verified > _SINKS + self.window:
            self._seen.copy_ends(self._cache, _SINKS, self.window)
            left_out = verified - self._seen.length
            return draft_chain(self.view, self._seen, context.last, limit, offset=left_out, **rules)
        try:
            return draft_chain(self.view, self._cache, context.last, limit, **rules)
        finally:
            self._cache.length = verified

    def observe(self, verdict: Verdict) -> None:
        """Count the places of a draft as its tokens: at most one of each place is accepted."""
        self.stopper.observe(len(verdict.drafted) // (1 + self.siblings), verdict.accepted)

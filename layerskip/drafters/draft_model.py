"""Drafting with a smaller model of the same tokenizer, on its own cache.

Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192). After a fully accepted draft the model lacks
the keys and values of its own last token. It is fed two tokens in the next round, which saves a pass in this one.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerskip.config import Method, SpeculativeConfig, shared
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.verify import Verdict
from layerskip.drafters.chain import ModelDrafter, draft_chain, load_draft_view
from layerskip.models.cache import KVCache
from layerskip.models.forward import clamp_tokens
from layerskip.models.target import Target


class DraftModel(ModelDrafter):
    """A drafter with a model over the target's tokens. The width of its output may differ by padding."""

    method = Method(
        "draft_model",
        (shared("draft_model"), shared("num_speculative_tokens", range=(1, 8)), shared("stop")),
        source="a smaller model of the same tokenizer",
        rank=8,
        color="#2ca02c",
        short="model",
        label=lambda config: config.draft_model,
        engine_method="draft_model",
    )

    @classmethod
    def build(cls, config: SpeculativeConfig, target: Target) -> DraftModel:
        draft, view = load_draft_view(config, target, same_tokenizer=True)
        return cls(view, draft.layers, config.num_speculative_tokens, config.stop)

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        self._chooser = chooser
        self._begin(cache, cache.capacity, prompt if self._reach(len(prompt)) > 0 else ())
        self._cache.length = self._verified = len(prompt)

    def draft(self, context: Context, limit: int) -> Draft:
        """Feed the committed tokens that the model lacks, then draft, up to the model's last position."""
        limit = min(limit, self.num_speculative_tokens, self._reach(len(context.tokens)))
        if limit < 1:
            return Draft.empty(context.last.device)
        self._verified = len(context.tokens)
        missing = len(context.tokens) - self._cache.length
        pending = clamp_tokens(self.model, context.last) if missing == 1 else self._readable(context.tokens[-missing:])
        return draft_chain(self.model, self._cache, pending, limit, self._chooser, self.stopper)

    def _reach(self, length: int) -> int:
        """Return the number of tokens that the model can draft after a text; it need not read the last one."""
        return self.num_speculative_tokens if self._most is None else self._most - length + 1

    def observe(self, verdict: Verdict) -> None:
        """Drop the keys and values of rejected tokens, and adapt the stop rule."""
        self._cache.length = min(self._cache.length, self._verified + verdict.accepted)
        super().observe(verdict)

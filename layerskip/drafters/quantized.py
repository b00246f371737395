"""Drafting with the target itself, its weights read at 8 or 4 bits.

A pass over a few rows costs the bytes of the weights. A draft of the same weights at fewer bits agrees with the target on
most tokens of any text, without training. The source is ML-SpecQD (arXiv 2503.13565). The draft runs on the target's own
cache, as those of :mod:`layerskip.drafters.layer_skip` do.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerskip.config import Field, Method, SpeculativeConfig, StopRule, shared
from layerskip.decoding.sampling import Chooser
from layerskip.drafters.layer_skip import LayerSkip
from layerskip.models.cache import KVCache
from layerskip.models.packing import drop_stale_packing, refuse_quantized
from layerskip.models.skip_view import quantized_view
from layerskip.models.target import Target

_BITS = {"int8": 8, "int4": 4}


class Quantized(LayerSkip):
    """A drafter through a view of the target, from :func:`layerskip.models.skip_view.quantized_view`."""

    method = Method(
        "quantized",
        (
            Field("weights", "int4", "the format of the draft's weights", choices=tuple(_BITS)),
            shared("num_speculative_tokens", range=(1, 8)),
            shared("stop", first=StopRule("adaptive")),
        ),
        source="the target with weights of fewer bits",
        rank=5,
        color="#1b9e77",
        label=lambda config: str(config.value("weights")),
        also=({"weights": "int8"},),
        paired=True,
        benchmark={"num_speculative_tokens": 3},
        no_engine="no engine drafts with its own target at fewer bits",
    )

    @classmethod
    def unsupported(cls, target: Target) -> str:
        return refuse_quantized(target.model)

    @classmethod
    def build(cls, config: SpeculativeConfig, target: Target) -> Quantized:
        view = quantized_view(target.model, _BITS[str(config.value("weights"))])
        return cls(view, config.num_speculative_tokens, config.stop)

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        drop_stale_packing(self.view)
        super().start(prompt, cache, chooser)

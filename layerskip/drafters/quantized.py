"""Drafting with the target itself, its weights read at 8 or 4 bits.

A pass over a few rows costs the bytes of the weights. A draft of the same weights at fewer bits agrees with the target on
most tokens of any text, without training. The source is ML-SpecQD (arXiv 2503.13565). The draft runs on the target's own
cache, as those of :mod:`layerskip.drafters.layer_skip` do.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerskip.config import Field, Method, StopRule, shared
from layerskip.decoding.sampling import Chooser
from layerskip.draft_plan import normalise_formats
from layerskip.drafters.layer_skip import LayerSkip
from layerskip.models.cache import KVCache
from layerskip.models.packing import drop_stale_packing, refuse_quantized
from layerskip.models.target import Target


class Quantized(LayerSkip):
    """A drafter through a view of the target that reads some of its weights at fewer bits."""

    method = Method(
        "quantized",
        (
            Field(
                "weights",
                "int4",
                "the format of the draft's weights, or a plan such as `int4;mlp:3=int8;layers:12-15=skip`",
                choices=("int8", "int4"),
                normalise=normalise_formats,
            ),
            shared("num_speculative_tokens", range=(1, 8)),
            shared("stop", first=StopRule("adaptive")),
            shared("draft_window"),
            shared("siblings"),
        ),
        source="the target with weights of fewer bits",
        rank=5,
        color="#1b9e77",
        label=lambda config: str(config.value("weights")),
        also=({"draft_window": 512}, {"weights": "int8"}),
        paired=True,
        benchmark={"num_speculative_tokens": 3},
        engine_method="draft_model",
    )

    @classmethod
    def unsupported(cls, target: Target) -> str:
        return refuse_quantized(target.model)

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        drop_stale_packing(self.view)
        super().start(prompt, cache, chooser)

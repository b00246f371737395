"""Rescaling of an EAGLE head during training, so that all its inputs have a root mean square of about 1.

AdamW (arXiv 1711.05101) moves every weight by about the same amount. Embeddings are a twentieth as large as hidden states.
Without scaling, it would spoil the weights of hidden states before it has moved those of embeddings. A rescaled head
computes the same function. A trained head is scaled back to the target's scale and costs nothing more when it drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.heads.eagle import EagleHead
from layerskip.heads.feature_store import TextFeatures


@dataclass(frozen=True)
class HeadScaling:
    """Scales of a head's inputs and outputs.

    Args:
        embeddings: scale of the target's embeddings.
        inputs: ``[F]`` or a scalar: scale of the hidden states that the head reads.
        outputs: scale of the hidden states that the target's output layer reads.
    """

    embeddings: float
    inputs: Tensor
    outputs: float

    @classmethod
    @torch.no_grad()
    def of(cls, head: EagleHead, embeddings: nn.Module, texts: Iterable[TextFeatures]) -> HeadScaling:
        """Measure root mean squares over answers, rounded to powers of two, which scale without rounding errors."""
        width, device = head.shape.hidden, next(head.parameters()).device
        answers = [(text.tokens[text.begin :].to(device), text.features[text.begin :].to(device).float()) for text in texts]
        features = torch.cat([states for _, states in answers])
        modules = features.view(features.shape[0], -1, width).square().mean((0, 2)).sqrt()
        embedded = embeddings(torch.cat([tokens for tokens, _ in answers])).float().square().mean().sqrt()
        inputs = modules[: len(head.shape.modules)].repeat_interleave(width)
        return cls(float(_power_of_two(embedded)), _power_of_two(inputs), float(_power_of_two(modules[-1])))

    @torch.no_grad()
    def apply(self, head: EagleHead) -> None:
        """Make a head read and return values divided by these scales."""
        self._rescale(head, self.embeddings, self.inputs, self.outputs)

    @torch.no_grad()
    def undo(self, head: EagleHead) -> None:
        """Undo :meth:`apply`."""
        self._rescale(head, 1 / self.embeddings, 1 / self.inputs, 1 / self.outputs)

    @staticmethod
    def _rescale(head: EagleHead, embeddings: float, inputs: Tensor, outputs: float) -> None:
        layer: Any = head.body.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        if isinstance(head.fuse, nn.Linear):
            head.fuse.weight *= inputs / outputs
            norm: Any = head.body.norm
            norm.weight /= outputs
            norm.variance_epsilon /= outputs**2
        if head.shape.side_by_side:
            layer.input_layernorm.state_norm.variance_epsilon /= outputs**2
            layer.input_layernorm.embedding_norm.variance_epsilon /= embeddings**2
        else:
            head.fc.weight[:, : head.shape.hidden] *= embeddings / outputs
            for part in (attention.q_proj, attention.k_proj, attention.v_proj):
                part.weight[:, : head.shape.hidden] *= outputs  # no norm comes before them
                part.weight[:, head.shape.hidden :] *= embeddings
        if head.shape.bias:
            head.fc.bias.mul_(1 / outputs)
        for part in (attention.o_proj, mlp.down_proj):
            part.weight /= outputs
        layer.post_attention_layernorm.variance_epsilon /= outputs**2


UNSCALED = HeadScaling(1.0, torch.ones(()), 1.0)  # the target's own scale


def _power_of_two(sizes: Tensor) -> Tensor:
    return sizes.where(sizes > 0, 1.0).log2().round().exp2()

"""In which units does an EAGLE head learn? In such ones that everything it reads is about 1.

An optimiser that moves every weight by about the same (AdamW, arXiv 1711.05101) has spoilt what stands behind hidden states
before it has moved what stands behind embeddings, which are a twentieth as large. A head in other units is the same
function, so a trained one goes back to the target's and costs nothing more when it drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.heads.eagle import EagleHead
from layerskip.heads.feature_store import Thought


@dataclass(frozen=True)
class Units:
    """How large things are in units of the target.

    Args:
        embeddings: its embeddings.
        read: ``[F]`` or a scalar: hidden states that the head reads.
        states: those that the target's output layer reads.
    """

    embeddings: float
    read: Tensor
    states: float

    @classmethod
    @torch.no_grad()
    def of(cls, head: EagleHead, embeddings: nn.Module, texts: Iterable[Thought]) -> Units:
        """Root mean squares over answers, to the nearest power of two, which changes no digit of what it scales.

        Args:
            head: whoever learns.
            embeddings: the target's.
            texts: some, with their hidden states.
        """
        width, device = head.shape.hidden, head.fc.weight.device
        answers = [(text.tokens[text.begin :].to(device), text.features[text.begin :].to(device).float()) for text in texts]
        features = torch.cat([states for _, states in answers])
        modules = features.view(features.shape[0], -1, width).square().mean((0, 2)).sqrt()
        embedded = embeddings(torch.cat([tokens for tokens, _ in answers])).float().square().mean().sqrt()
        read = modules[: len(head.shape.modules)].repeat_interleave(width)
        return cls(float(_power_of_two(embedded)), _power_of_two(read), float(_power_of_two(modules[-1])))

    @torch.no_grad()
    def enter(self, head: EagleHead) -> None:
        """Have a head that is in the target's units read and say everything in these."""
        self._convert(head, self.embeddings, self.read, self.states)

    @torch.no_grad()
    def leave(self, head: EagleHead) -> None:
        """Undo :meth:`enter`."""
        self._convert(head, 1 / self.embeddings, 1 / self.read, 1 / self.states)

    @staticmethod
    def _convert(head: EagleHead, embeddings: float, read: Tensor, states: float) -> None:
        layer: Any = head.body.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        if isinstance(head.fuse, nn.Linear):
            head.fuse.weight *= read / states
            norm: Any = head.body.norm
            norm.weight /= states
            norm.variance_epsilon /= states**2
        head.fc.weight[:, : head.shape.hidden] *= embeddings / states
        if head.shape.bias:
            head.fc.bias.mul_(1 / states)
        for part in (attention.q_proj, attention.k_proj, attention.v_proj):
            part.weight[:, : head.shape.hidden] *= states  # no norm stands before them
            part.weight[:, head.shape.hidden :] *= embeddings
        for part in (attention.o_proj, mlp.down_proj):
            part.weight /= states
        layer.post_attention_layernorm.variance_epsilon /= states**2


NATURAL = Units(1.0, torch.ones(()), 1.0)  # the target's


def _power_of_two(sizes: Tensor) -> Tensor:
    return sizes.where(sizes > 0, 1.0).log2().round().exp2()

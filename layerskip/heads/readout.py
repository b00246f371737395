"""Which tokens does a draft choose among? The target's own output layer, over all of its tokens or over the commonest.

A draft's head is paid for with every drafted token and is a fifth of a small model's weights; tokens that it leaves out only
cost acceptance. FR-Spec (arXiv 2502.14856), section 3: the draft's q has its support there, the target's p everywhere. While
a text is continued, :mod:`layerskip.models.output_rows` has its tokens join them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from layerskip.models.output_rows import OutputRows
from layerskip.models.packing import multiply, packs
from layerskip.models.target import Target


class Readout:
    """The target's output layer over the tokens that a head drafts from.

    Args:
        target: whose it is.
        tokens: ``[v]`` int64; None for all.

    Attributes:
        scale: what logits are multiplied by.
    """

    def __init__(self, target: Target, tokens: Tensor | None) -> None:
        layer = target.model.get_output_embeddings()
        bias = getattr(layer, "bias", None)
        config = target.model.config.get_text_config(decoder=True)
        self.scale = float(getattr(config, "logit_scale", None) or 1.0)
        self.scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        self._cap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
        self._whole = layer.weight, bias
        self._rows = None
        if tokens is not None:
            self._rows = OutputRows(layer.weight, bias, tokens, target.vocabulary, packs(target.model))

    @property
    def tokens(self) -> Tensor | None:
        """``[v]`` int64: those of the logits; None for all."""
        return None if self._rows is None else self._rows.tokens

    @property
    def weight(self) -> Tensor:
        """``[v, H]``: the layer's."""
        return self._whole[0] if self._rows is None else self._rows.weight

    def begin(self) -> None:
        """Forget the text before."""
        if self._rows is not None:
            self._rows.begin()

    def follow(self, text: Sequence[int]) -> None:
        """Draft from the tokens of a text, too, which goes on where it stood at the last call."""
        if self._rows is not None:
            self._rows.follow(text)

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., v]`` logits."""
        logits = self._whole_logits(hidden) if self._rows is None else self._rows.multiply(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        return self._cap * (logits / self._cap).tanh() if self._cap else logits

    def _whole_logits(self, hidden: Tensor) -> Tensor:
        weight, bias = self._whole
        if torch.is_grad_enabled():  # nobody trains the target
            return linear(hidden, weight.detach(), None if bias is None else bias.detach())
        return multiply(hidden, weight, bias)

    def token(self, place: int) -> int:
        """The target's token at a place of the logits."""
        return place if self._rows is None else self._rows.token(place)


def choose_tokens(counts: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """``[size]`` int64, ascending: the tokens that occur most often, those that must be there among them.

    Of tokens that occur as often, those of lower numbers are taken: tokenizers learn what is common first.

    Args:
        counts: ``[V]``: how often each token occurs.
        size: how many to choose; no fewer than must be there.
        always: tokens that are chosen whatever their count.
    """
    raised = counts.double().clone()
    raised[list(always)] = float("inf")
    return raised.sort(descending=True, stable=True).indices[:size].sort().values

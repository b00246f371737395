"""Which tokens does a draft choose among? The target's own output layer, over all of its tokens or over the commonest.

A draft's head is paid for with every drafted token and is a fifth of a small model's weights; tokens that it leaves out only
cost acceptance. FR-Spec (arXiv 2502.14856), section 3: the draft's q has its support there, the target's p everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .target import Target


class Readout:
    """The target's output layer over the tokens that a head drafts from.

    Args:
        target: whose it is.
        tokens: ``[v]`` int64; None for all.
    """

    def __init__(self, target: Target, tokens: Tensor | None) -> None:
        layer = target.model.get_output_embeddings()
        bias = getattr(layer, "bias", None)
        weight, bias = layer.weight.detach(), None if bias is None else bias.detach()  # nobody trains the target
        config = target.model.config.get_text_config(decoder=True)
        self._scale = float(getattr(config, "logit_scale", None) or 1.0)
        self._scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        self._cap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
        self.tokens = None if tokens is None else tokens.to(weight.device)
        self._numbers: list[int] | None = None if tokens is None else tokens.tolist()
        self.weight = weight if tokens is None else weight[tokens]
        self.bias = bias if bias is None or tokens is None else bias[tokens]

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., v]`` logits."""
        logits = nn.functional.linear(hidden, self.weight, self.bias)
        if self._scale != 1.0:
            logits = logits * self._scale
        return self._cap * (logits / self._cap).tanh() if self._cap else logits

    def token(self, place: int) -> int:
        """The target's token at a place of the logits."""
        return place if self._numbers is None else self._numbers[place]


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

"""The target's output layer as heads use it, over all tokens or over the most common ones.

The output layer runs for every drafted token and holds a fifth of a small model's weights. Tokens that it leaves out only
reduce acceptance: the draft's q is restricted to the common tokens, the target's p is not (FR-Spec, arXiv 2502.14856,
section 3). While a text is continued, :mod:`layerskip.models.draft_head` adds the tokens of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from layerskip.models.architecture import architecture
from layerskip.models.draft_head import OutputRows
from layerskip.models.packing import multiply, uses_packing
from layerskip.models.target import Target
from layerskip.models.weights import check_dense, check_not_split


class Readout:
    """The target's output layer over the tokens that a head may draft.

    Args:
        tokens: ``[v]`` int64; None for all.

    Attributes:
        modules: name of the target's sub-module whose output the layer, and every head, reads; as a tuple of one.
        scale: factor of the logits.

    Raises:
        ConfigError: the output layer is quantised, or the target is on several devices.
    """

    def __init__(self, target: Target, tokens: Tensor | None) -> None:
        body = target.model.base_model_prefix
        # Llama 4's text model names a body that only its multimodal version has.
        self.modules = (body if hasattr(target.model, body) else architecture(target.model).path.rpartition(".")[0],)
        layer: Any = target.model.get_output_embeddings()
        check_not_split(target.model, "heads")
        check_dense(layer, target.model, "heads")
        bias = getattr(layer, "bias", None)
        config = target.model.config.get_text_config(decoder=True)
        self.scale = float(getattr(config, "logit_scale", None) or 1.0)
        self.scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        self._cap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
        self._whole = layer.weight, bias
        self._rows = None
        if tokens is not None:
            self._rows = OutputRows(layer.weight, bias, tokens, target.vocabulary, uses_packing(target.model))

    @property
    def tokens(self) -> Tensor | None:
        """The tokens of the logits, ``[v]`` int64; None for all."""
        return None if self._rows is None else self._rows.tokens

    @property
    def weight(self) -> Tensor:
        """The layer's weight, ``[v, H]``."""
        return self._whole[0] if self._rows is None else self._rows.weight

    def begin(self) -> None:
        """Begin a new text."""
        if self._rows is not None:
            self._rows.begin()

    def follow(self, text: Sequence[int]) -> None:
        """Add the tokens of a text, which continues the text of the last call."""
        if self._rows is not None:
            self._rows.follow(text)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., v]`` of hidden states ``[..., H]``."""
        logits = self._whole_logits(hidden) if self._rows is None else self._rows.multiply(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        return self._cap * (logits / self._cap).tanh() if self._cap else logits

    def _whole_logits(self, hidden: Tensor) -> Tensor:
        weight, bias = self._whole
        if torch.is_grad_enabled():  # the target itself is never trained
            return linear(hidden, weight.detach(), None if bias is None else bias.detach())
        return multiply(hidden, weight, bias)

    def tokens_at(self, places: Tensor) -> Tensor:
        """Return the target's tokens at int64 indices of the logits, in their shape."""
        return places if self._rows is None else self._rows.tokens[places]


def choose_tokens(counts: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """Choose the most frequent tokens; return them in ascending order, ``[size]`` int64.

    Of equally frequent tokens the lower ids are chosen, because tokenizers learn common tokens first.

    Args:
        counts: ``[V]``: how often each token occurs.
        size: how many to choose, at least as many as ``always`` has.
        always: tokens that are chosen whatever their count.
    """
    raised = counts.double().clone()
    raised[list(always)] = float("inf")
    return raised.sort(descending=True, stable=True).indices[:size].sort().values

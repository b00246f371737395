"""The target's output layer as heads use it, over all tokens or over the most common ones.

The output layer runs for every drafted token and holds a fifth of a small model's weights. Tokens that it leaves out only
reduce acceptance: the draft's q is restricted to the common tokens, the target's p is not (FR-Spec, arXiv 2502.14856,
section 3).

Texts repeat their own tokens, however rare these are elsewhere. The text precedes the draft, so the draft's distribution q
may include its tokens; without them, a draft from common tokens alone loses more of its acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from layerskip.device.transfer import copy_to_device
from layerskip.models.packing import Product, multiply, pack_weight, uses_packing
from layerskip.models.target import Target
from layerskip.models.weights import check_dense, check_not_split

_ROOM = 256  # rows reserved for tokens of a text; with more, all rows are copied


class Readout:
    """The target's output layer over the tokens that a head may draft: all, or the common ones and those of the text."""

    tokens: Tensor | None  # ``[v + w]`` int64: the common tokens, then those of the text; None for all
    weight: Tensor  # ``[v + w, H]``
    bias: Tensor | None  # ``[v + w]``
    scale: float  # factor of the logits

    def __init__(self, target: Target, tokens: Tensor | None) -> None:
        """Read the layer, for the common ``tokens``, ``[v]`` int64, or for all.

        Raises:
            ConfigError: the output layer is quantised, or the target is on several devices.
        """
        layer: Any = target.model.get_output_embeddings()
        check_not_split(target.model, "heads")
        check_dense(layer, target.model, "heads")
        config = target.model.config.get_text_config(decoder=True)
        self.scale = float(getattr(config, "logit_scale", None) or 1.0)
        self.scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        self._cap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
        self._vocabulary = target.vocabulary
        self._whole: list[Tensor] = [part for part in (layer.weight, getattr(layer, "bias", None)) if part is not None]
        self._rows = self._whole
        self._packed: Product | None = None
        self._common = None if tokens is None else tokens.to(layer.weight.device)
        self._common_ids = frozenset(() if tokens is None else tokens.tolist())
        if self._common is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._rows = [part[self._common] for part in self._whole]
                self._packed = pack_weight(self._rows[0]) if uses_packing(target.model) else None
        self.begin()

    def begin(self) -> None:
        """Begin a new text: drop the tokens of the last one."""
        self._own, self._read = set[int](), 0
        self._use(self._common)

    def follow(self, text: Sequence[int]) -> None:
        """Add the tokens of a text, which continues the text of the last call."""
        if self.tokens is None:
            return
        unread = (token for token in text[self._read :] if token < self._vocabulary and token not in self._common_ids)
        new = [token for token in dict.fromkeys(unread) if token not in self._own]
        self._read = len(text)
        if new:
            self._own.update(new)
            self._append(self.tokens, copy_to_device(new, self.tokens.device))

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., v + w]`` of hidden states ``[..., H]``."""
        logits = self._multiply(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        return self._cap * (logits / self._cap).tanh() if self._cap else logits

    def tokens_at(self, places: Tensor) -> Tensor:
        """Return the target's tokens at int64 indices of the logits, in their shape."""
        return places if self.tokens is None else self.tokens[places]

    def _multiply(self, hidden: Tensor) -> Tensor:
        if self.tokens is None:
            return multiply(hidden, self.weight, self.bias)
        if self._packed is None or hidden.dtype != self.weight.dtype or (torch.is_grad_enabled() and hidden.requires_grad):
            return linear(hidden, self.weight, self.bias)
        common = len(self._common_ids)
        logits = self._packed(hidden, None if self.bias is None else self.bias[:common])
        if not self._own:
            return logits
        own = linear(hidden, self.weight[common:], None if self.bias is None else self.bias[common:])
        return torch.cat((logits, own), -1)

    @torch.inference_mode(False)  # inference tensors could not be written outside inference mode
    @torch.no_grad()
    def _append(self, tokens: Tensor, new: Tensor) -> None:
        before, size = tokens.shape[0], tokens.shape[0] + new.shape[0]
        for index, whole in enumerate(self._whole):
            if size > self._rows[index].shape[0]:
                room = whole.new_zeros(new.shape[0] + _ROOM, *whole.shape[1:])
                self._rows[index] = torch.cat((self._rows[index][:before], room))
            self._rows[index][before:size] = whole[new]
        self._use(torch.cat((tokens, new)))

    def _use(self, tokens: Tensor | None) -> None:
        """Draft from these tokens, whose rows are the first ones."""
        self.tokens = tokens
        self.weight, *bias = self._rows if tokens is None else [rows[: tokens.shape[0]] for rows in self._rows]
        self.bias = bias[0] if bias else None


def choose_tokens(counts: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """Return the most frequent tokens in ascending order, ``[size]`` int64, from how often each occurs, ``[V]``.

    Of equally frequent tokens the lower ids are chosen, because tokenizers learn common tokens first. Tokens of ``always``,
    at most ``size``, are chosen whatever their count.
    """
    raised = counts.double().clone()
    raised[list(always)] = float("inf")
    return raised.sort(descending=True, stable=True).indices[:size].sort().values

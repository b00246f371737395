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
from layerskip.models.packing import multiply, pack_weight, uses_packing
from layerskip.models.target import Target
from layerskip.models.weights import check_dense, check_not_split

_ROOM = 256  # rows reserved for tokens of a text; with more, all rows are copied


class OutputRows:
    """The rows of an output layer for common tokens, followed by those for tokens of the text.

    Args:
        weight: ``[V, H]``: the layer's weight.
        bias: ``[V]``; None if the layer has none.
        tokens: ``[v]`` int64: the common tokens.
        known: only tokens below this id are drafted.
        packed: whether to pack the rows of the common tokens (:mod:`layerskip.models.packing`).

    Attributes:
        tokens: ``[v + w]`` int64: the common tokens, then those of the text.
        weight: ``[v + w, H]``.
        bias: ``[v + w]``; None if the layer has none.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, tokens: Tensor, known: int, packed: bool = False) -> None:
        self._whole = [part.detach() for part in (weight, bias) if part is not None]
        self._common, self._known = tokens.to(weight.device), known
        self._ids: list[int] = tokens.tolist()
        self._in_common = frozenset(self._ids)
        with torch.inference_mode(False), torch.no_grad():
            self._rows = [part[self._common] for part in self._whole]
            self._packed = pack_weight(self._rows[0]) if packed else None
        self.begin()

    def begin(self) -> None:
        """Start a new text: drop the tokens of the last one."""
        del self._ids[len(self._in_common) :]
        self._own: set[int] = set()
        self._read = 0
        self.tokens = self._common
        self._cut()

    def follow(self, text: Sequence[int]) -> None:
        """Add the tokens of a text, which continues the text of the last call."""
        unknown = (token for token in text[self._read :] if token < self._known and token not in self._in_common)
        new = [token for token in dict.fromkeys(unknown) if token not in self._own]
        self._read = len(text)
        if new:
            self._own.update(new)
            self._append(new)

    def multiply(self, hidden: Tensor) -> Tensor:
        """Map hidden states ``[..., H]`` to the logits of these tokens, ``[..., v + w]``."""
        if self._packed is None or hidden.dtype != self.weight.dtype or (torch.is_grad_enabled() and hidden.requires_grad):
            return linear(hidden, self.weight, self.bias)
        common = len(self._in_common)
        logits = self._packed(hidden, None if self.bias is None else self.bias[:common])
        if len(self._ids) == common:
            return logits
        own = linear(hidden, self.weight[common:], None if self.bias is None else self.bias[common:])
        return torch.cat((logits, own), -1)

    @torch.inference_mode(False)  # inference tensors could not be written outside inference mode
    @torch.no_grad()
    def _append(self, new: list[int]) -> None:
        tokens, before = copy_to_device(new, self._common.device), len(self._ids)
        self._ids += new
        size = len(self._ids)
        for index, whole in enumerate(self._whole):
            if size > self._rows[index].shape[0]:
                room = whole.new_zeros(len(new) + _ROOM, *whole.shape[1:])
                self._rows[index] = torch.cat((self._rows[index][:before], room))
            self._rows[index][before:size] = whole[tokens]
        self.tokens = torch.cat((self.tokens, tokens))
        self._cut()

    def _cut(self) -> None:
        size = len(self._ids)
        self.weight = self._rows[0][:size]
        self.bias = self._rows[1][:size] if len(self._rows) > 1 else None


class Readout:
    """The target's output layer over the tokens that a head may draft.

    Args:
        tokens: ``[v]`` int64; None for all.

    Attributes:
        scale: factor of the logits.

    Raises:
        ConfigError: the output layer is quantised, or the target is on several devices.
    """

    def __init__(self, target: Target, tokens: Tensor | None) -> None:
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

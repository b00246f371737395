"""Which rows of an output layer does a draft look at? Those of common tokens, and of what the text has said.

What a text has said it often says again, however rare it is elsewhere. It comes before what is drafted, so the draft's q may
have its support there: on SmolLM2 a bridged draft from 16384 of 49152 tokens gives up 0.008 of its first token's acceptance
with them, and gave up 0.041 without (layers 2 to 16 in two records, ``bridges-longer-smollm2-2-cores.json`` and
``bridges-smollm2-2-cores.json``). Where a common token and one of the text are equally likely, which half precision has now
and then, the common one comes first, whatever their numbers; a scan takes the lower number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from layerskip.device.upload import upload
from layerskip.models.packing import lay_out, multiply_by

_ROOM = 256  # rows for tokens of a text, before all are copied again


class OutputRows:
    """Rows of an output layer.

    Args:
        weight: ``[V, H]``: the layer's.
        bias: ``[V]``, if it has one.
        tokens: ``[v]`` int64: the common ones.
        known: tokens from here on are never drafted.
        packed: whether products by the common ones are taken from a layout of them.

    Attributes:
        tokens: ``[v + w]`` int64: the common ones, and behind them those of the text.
        weight: ``[v + w, H]``.
        bias: ``[v + w]``, if there is one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, tokens: Tensor, known: int, packed: bool = False) -> None:
        self._whole = [part.detach() for part in (weight, bias) if part is not None]
        self._common, self._known = tokens.to(weight.device), known
        self._numbers: list[int] = tokens.tolist()
        self._in_common = frozenset(self._numbers)
        with torch.inference_mode(False), torch.no_grad():
            self._rows = [part[self._common] for part in self._whole]
            self._layout = lay_out(self._rows[0]) if packed else None
        self.begin()

    def begin(self) -> None:
        """Forget the text before."""
        del self._numbers[len(self._in_common) :]
        self._own: set[int] = set()
        self._read = 0
        self.tokens = self._common
        self._cut()

    def follow(self, text: Sequence[int]) -> bool:
        """Take the tokens of a text in, which goes on where it stood at the last call; returns whether any was new."""
        new = list(
            dict.fromkeys(
                token
                for token in text[self._read :]
                if token < self._known and token not in self._in_common and token not in self._own
            )
        )
        self._read = len(text)
        if new:
            self._own.update(new)
            self._append(new)
        return bool(new)

    def multiply(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., v + w]``: their logits."""
        if self._layout is None or hidden.dtype != self.weight.dtype or (torch.is_grad_enabled() and hidden.requires_grad):
            return linear(hidden, self.weight, self.bias)
        common = len(self._in_common)
        first = None if self.bias is None else self.bias[:common]
        found = multiply_by(self._layout, hidden, first)
        if len(self._numbers) == common:
            return found
        own = linear(hidden, self.weight[common:], None if self.bias is None else self.bias[common:])
        return torch.cat((found, own), -1)

    def token(self, place: int) -> int:
        """The token of a row."""
        return self._numbers[place]

    @torch.inference_mode(False)  # rows that were made while decoding could not be written again elsewhere
    @torch.no_grad()
    def _append(self, new: list[int]) -> None:
        tokens, before = upload(new, self._common.device), len(self._numbers)
        self._numbers += new
        size = len(self._numbers)
        for number, whole in enumerate(self._whole):
            if size > self._rows[number].shape[0]:
                room = whole.new_empty(len(new) + _ROOM, *whole.shape[1:])
                self._rows[number] = torch.cat((self._rows[number][:before], room))
            self._rows[number][before:size] = whole[tokens]
        self.tokens = torch.cat((self.tokens, tokens))
        self._cut()

    def _cut(self) -> None:
        size = len(self._numbers)
        self.weight = self._rows[0][:size]
        self.bias = self._rows[1][:size] if len(self._rows) > 1 else None

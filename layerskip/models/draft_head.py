"""Draft heads: a model's output layer for common tokens and the tokens of the current text.

Texts repeat their own tokens, however rare these are elsewhere. The text precedes the draft, so the draft's distribution q
may include its tokens; without them, a draft from common tokens alone loses more of its acceptance. Half precision
sometimes makes a common token and one of the text equally likely; then the common one comes first, whatever their ids. A
scan takes the lower id. See also :mod:`layerskip.heads.readout`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from layerskip.config import ConfigError
from layerskip.device.transfer import copy_to_device
from layerskip.models.packing import pack_weight, uses_packing
from layerskip.models.target import Target
from layerskip.models.trained_module import load_trained, save_trained
from layerskip.models.weights import check_dense, check_not_split

_KIND = "draft_head"
_ROOM = 256  # rows reserved for tokens of a text; with more, all rows are copied. Zeros, as captured passes read them


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

    def follow(self, text: Sequence[int]) -> Tensor:
        """Add the tokens of a text, which continues the text of the last call; return all tokens that can be drafted."""
        unknown = (token for token in text[self._read :] if token < self._known and token not in self._in_common)
        new = [token for token in dict.fromkeys(unknown) if token not in self._own]
        self._read = len(text)
        if new:
            self._own.update(new)
            self._append(new)
        return self.tokens

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

    @torch.inference_mode(False)
    @torch.no_grad()
    def reserve(self) -> tuple[tuple[int, int], ...]:
        """Reserve rows, and return the addresses and sizes of what :meth:`multiply_reserved` reads."""
        if self._rows[0].shape[0] == len(self._in_common):
            self._rows = [torch.cat((part, part.new_zeros(_ROOM, *part.shape[1:]))) for part in self._rows]
            self._cut()
        return tuple((part.data_ptr(), part.shape[0]) for part in self._rows)

    def multiply_reserved(self, hidden: Tensor) -> Tensor:
        """Map hidden states ``[..., H]`` to logits of all rows, also those that are reserved."""
        return linear(hidden, *self._rows)

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


class OutputLayer(nn.Module):
    """Output rows as the output layer of a model."""

    def __init__(self, rows: OutputRows) -> None:
        super().__init__()
        self.rows = rows
        self._with_reserved = False

    @property
    def weight(self) -> Tensor:
        """``[n, H]``; the code of some model families reads it."""
        return self.rows.weight

    @contextlib.contextmanager
    def with_reserved(self) -> Iterator[None]:
        """Compute logits of reserved rows, too, within the ``with`` block, as a captured pass must whose shapes stay."""
        self._with_reserved = True
        try:
            yield
        finally:
            self._with_reserved = False

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states ``[..., H]`` to logits ``[..., n]``."""
        return self.rows.multiply_reserved(hidden) if self._with_reserved else self.rows.multiply(hidden)


class DraftHead(OutputRows):
    """The output rows of a model that drafts, for ``tokens [v]`` int64, rising, below ``vocabulary``, the target's.

    Raises:
        ConfigError: a token is beyond it, the model has no linear output layer or a quantised one, or is on several devices.
    """

    def __init__(self, model: PreTrainedModel, tokens: Tensor, vocabulary: int) -> None:
        layer = model.get_output_embeddings()
        if not isinstance(layer, nn.Linear):
            raise ConfigError(f"draft_head: {type(model).__name__} has no linear output layer")
        check_not_split(model, "draft heads")
        check_dense(layer, model, "draft heads")
        size = min(layer.out_features, vocabulary)
        if not tokens.numel() or int(tokens.max()) >= size:
            raise ConfigError("draft_head: has no tokens, or tokens outside the model's vocabulary")
        super().__init__(layer.weight, layer.bias, tokens, size, uses_packing(model))

    def restrict(self, view: PreTrainedModel) -> None:
        """Replace the output layer of a view of the model; its logits become ``[n, v]``. The view must not be shared."""
        view.set_output_embeddings(OutputLayer(self))


def save_draft_tokens(folder: Path, tokens: Tensor, target: Target, training: Mapping[str, Any]) -> None:
    """Save the tokens of a target's draft head, ``[v]`` int64, rising, with a record of how they were chosen."""
    save_trained(folder, _KIND, {"tokens": len(tokens)}, {"tokens": tokens}, target, training)


def load_draft_tokens(folder: str | Path, target: Target) -> Tensor:
    """Load the tokens of a draft head, ``[v]`` int64, rising; a :class:`ConfigError` as in :func:`load_trained`."""
    _, weights = load_trained(folder, _KIND, target, "draft_head")
    tokens = weights.get("tokens")
    if tokens is None or not bool((tokens.diff() > 0).all()):
        raise ConfigError(f"draft_head: {folder} is damaged: it has no list of tokens")
    return tokens

"""Which tokens may a model draft? Its output layer over few tokens, as :mod:`layerskip.readout` says, cut out of a view.

What a text has said it often says again, however rare it is elsewhere; so the tokens of a text join those of a head while it
is continued. They come before what is drafted, so the draft's q may have its support there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .config import ConfigError
from .heads import load_head, save_head
from .sampling import upload
from .target import Target

_KIND = "draft_head"
_ROOM = 256  # rows for tokens of a text, before all are copied again


class DraftHead:
    """A model's output layer over some tokens, and over those of the text that is continued.

    Args:
        model: whose; of the target's tokenizer.
        tokens: ``[v]`` int64, rising.
        vocabulary: V, the width of the target's logits.

    Attributes:
        tokens: ``[v]`` int64: those that are drafted now.

    Raises:
        ConfigError: a token is not one of the model's, or the model has no output layer of its own.
    """

    def __init__(self, model: PreTrainedModel, tokens: Tensor, vocabulary: int) -> None:
        layer = model.get_output_embeddings()
        if not isinstance(layer, nn.Linear):
            raise ConfigError(f"draft_head: {type(model).__name__} has no output layer that could be cut")
        self._known = min(layer.out_features, vocabulary)
        if not tokens.numel() or int(tokens.max()) >= self._known:
            raise ConfigError("draft_head: has tokens that the model does not have, or none")
        self._whole, self._common = layer, tokens.to(layer.weight.device)
        self._layer = nn.Linear(layer.in_features, tokens.numel(), layer.bias is not None, device="meta")
        self._rows = [part[self._common].detach() for part in (layer.weight, layer.bias) if part is not None]
        self._in_common = frozenset(tokens.tolist())
        self.begin()

    def begin(self) -> None:
        """Forget the text before."""
        self._own: dict[int, None] = {}  # tokens of the text, as they came
        self._read = 0
        self._say()

    def follow(self, text: Sequence[int]) -> None:
        """Let the tokens of a text be drafted, too; it goes on where it stood at the last call."""
        new = dict.fromkeys(
            token
            for token in text[self._read :]
            if token < self._known and token not in self._in_common and token not in self._own
        )
        self._read = len(text)
        if new:
            self._own |= new
            self._say()

    def _say(self) -> None:
        """Narrow the layer; the common rows lie where they are, and those of the text behind them."""
        own = upload(list(self._own), self._common.device)
        size = self._common.numel() + own.numel()
        self.tokens, self._layer.out_features = torch.cat((self._common, own)), size
        for number, (name, whole) in enumerate(self._whole.named_parameters()):
            if size > self._rows[number].shape[0]:
                room = whole.new_empty(max(0, size - self._common.numel() + _ROOM), *whole.shape[1:])
                self._rows[number] = torch.cat((whole.detach()[self._common], room.detach()))
            rows = self._rows[number][:size]
            if own.numel():
                rows[self._common.numel() :] = whole.detach()[own]
            setattr(self._layer, name, nn.Parameter(rows, requires_grad=False))

    def narrow(self, view: PreTrainedModel) -> None:
        """Let a view of the model, which is nobody else's, say these tokens' ``[n, v]`` logits alone."""
        view.set_output_embeddings(self._layer)


def save_draft_tokens(folder: Path, tokens: Tensor, target: Target, training: Mapping[str, Any]) -> None:
    """Write the tokens ``[v]`` int64, rising, that a target's drafts may have, and how they were chosen."""
    save_head(folder, _KIND, {"tokens": len(tokens)}, {"tokens": tokens}, target, training)


def load_draft_tokens(folder: str | Path, target: Target) -> Tensor:
    """``[v]`` int64, rising: the tokens that a target's drafts may have.

    Raises:
        ConfigError: there are none, they are damaged, or they were chosen for another target.
    """
    _, weights = load_head(folder, _KIND, target, "draft_head")
    tokens = weights.get("tokens")
    if tokens is None or tokens.dtype != torch.int64 or tokens.ndim != 1 or not bool((tokens.diff() > 0).all()):
        raise ConfigError(f"draft_head: {folder} is damaged: it has no list of tokens")
    return tokens

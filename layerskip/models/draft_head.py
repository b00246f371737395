"""Draft heads: a model's output layer reduced to a part of the vocabulary. See also :mod:`layerskip.heads.readout`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.config import ConfigError
from layerskip.models.output_rows import OutputLayer, OutputRows
from layerskip.models.packing import uses_packing
from layerskip.models.placement import check_not_split
from layerskip.models.quantization import check_dense
from layerskip.models.target import Target
from layerskip.models.trained_module import load_trained, save_trained

_KIND = "draft_head"


class DraftHead:
    """A model's output layer over some common tokens and the tokens of the current text.

    Args:
        model: the model that drafts.
        tokens: ``[v]`` int64, rising: the common tokens.
        vocabulary: V: only tokens below it are drafted; the model's vocabulary may be larger than the target's.

    Raises:
        ConfigError: a token is not in the model's vocabulary, the model has no linear output layer or a quantised one, or it
            is on several devices.
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
        self._rows = OutputRows(layer.weight, layer.bias, tokens, size, uses_packing(model))

    @property
    def tokens(self) -> Tensor:
        """``[v]`` int64: the tokens that can be drafted now."""
        return self._rows.tokens

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The weight, and the bias if any, of these tokens: copies of the model's rows."""
        return (self._rows.weight,) if self._rows.bias is None else (self._rows.weight, self._rows.bias)

    def begin(self) -> None:
        """Start a new text: drop the tokens of the last one."""
        self._rows.begin()

    def follow(self, text: Sequence[int]) -> Tensor:
        """Add the tokens of a text, which continues the text of the last call; return all tokens that can be drafted."""
        self._rows.follow(text)
        return self.tokens

    def restrict(self, view: PreTrainedModel) -> None:
        """Replace the output layer of a view of the model; its logits become ``[n, v]``. The view must not be shared."""
        view.set_output_embeddings(OutputLayer(self._rows))


def save_draft_tokens(folder: Path, tokens: Tensor, target: Target, training: Mapping[str, Any]) -> None:
    """Save the tokens of a draft head, ``[v]`` int64, rising, with a record of how they were chosen.

    Args:
        folder: the folder to write.
        tokens: ``[v]`` int64, rising.
        target: the model that they belong to.
        training: the record, as plain values.
    """
    save_trained(folder, _KIND, {"tokens": len(tokens)}, {"tokens": tokens}, target, training)


def load_draft_tokens(folder: str | Path, target: Target) -> Tensor:
    """Load the tokens of a draft head, ``[v]`` int64, rising.

    Raises:
        ConfigError: the folder has no draft head, it is damaged, or it belongs to another target.
    """
    _, weights = load_trained(folder, _KIND, target, "draft_head")
    tokens = weights.get("tokens")
    if tokens is None or tokens.dtype != torch.int64 or tokens.ndim != 1 or not bool((tokens.diff() > 0).all()):
        raise ConfigError(f"draft_head: {folder} is damaged: it has no list of tokens")
    return tokens

"""Which tokens may a model draft? Its output layer over few tokens, as :mod:`layerskip.heads.readout` says, cut out of a view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.config import ConfigError
from layerskip.models.output_rows import OutputRows
from layerskip.models.packing import packs
from layerskip.models.target import Target
from layerskip.models.trained_module import load_head, save_head

_KIND = "draft_head"


class DraftHead:
    """A model's output layer over some tokens, and over those of the text that is continued.

    Args:
        model: whose.
        tokens: ``[v]`` int64, rising.
        vocabulary: V: the tokens that may be drafted end there, as the model's own may reach further than the target's.

    Raises:
        ConfigError: a token is not one of the model's, or the model has no output layer of its own.
    """

    def __init__(self, model: PreTrainedModel, tokens: Tensor, vocabulary: int) -> None:
        layer = model.get_output_embeddings()
        if not isinstance(layer, nn.Linear):
            raise ConfigError(f"draft_head: {type(model).__name__} has no output layer that could be cut")
        known = min(layer.out_features, vocabulary)
        if not tokens.numel() or int(tokens.max()) >= known:
            raise ConfigError("draft_head: has tokens that the model does not have, or none")
        self._rows = OutputRows(layer.weight, layer.bias, tokens, known, packs(model))

    @property
    def tokens(self) -> Tensor:
        """``[v]`` int64: those that are drafted now."""
        return self._rows.tokens

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Those of the tokens that are drafted now: copies of the model's rows."""
        return (self._rows.weight,) if self._rows.bias is None else (self._rows.weight, self._rows.bias)

    def begin(self) -> None:
        """Forget the text before."""
        self._rows.begin()

    def follow(self, text: Sequence[int]) -> Tensor:
        """Let the tokens of a text be drafted, too, which goes on where it stood at the last call; returns all that are."""
        self._rows.follow(text)
        return self.tokens

    def narrow(self, view: PreTrainedModel) -> None:
        """Let a view of the model, which is nobody else's, say these tokens' ``[n, v]`` logits alone."""
        view.set_output_embeddings(_Layer(self._rows))


class _Layer(nn.Module):
    """Rows as a model's output layer."""

    def __init__(self, rows: OutputRows) -> None:
        super().__init__()
        self._rows = rows

    @property
    def weight(self) -> Tensor:
        """``[n, H]``: some families look at it."""
        return self._rows.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., n]``."""
        return self._rows.multiply(hidden)


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

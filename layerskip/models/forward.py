"""What does a model say about the next tokens? One forward pass on a :class:`~layerskip.models.cache.KVCache`.

Target, draft view and draft model all run through here, so they see positions and masks in the same way. The pass writes
keys and values behind ``cache.length`` and does not move it.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from layerskip.models.features import NOTHING, Features
from layerskip.models.graph_capture import RecordedCache


def forward(
    model: nn.Module,
    tokens: Tensor,
    cache: Cache,
    last: int,
    positions: Tensor | None = None,
    features: Features = NOTHING,
) -> Tensor:
    """The logits behind the last tokens of a block that stands at position ``cache.length``.

    Args:
        model: a Hugging Face causal language model, or a view of one.
        tokens: ``[n]`` int64.
        cache: read up to ``length``, written behind it.
        last: how many of the n positions to return, 0 to n.
        positions: ``[n]`` int64: where the tokens stand, if not one behind the other from ``cache.length`` on.
        features: read in this pass.

    Returns:
        ``[last, V]`` in the model's dtype.
    """
    if positions is None and isinstance(cache, RecordedCache) and _may_be_recorded(model, tokens, cache):
        return _recorded(model, tokens, cache, last, features)
    with features.of(model):
        return _pass(model, tokens, cache, last, positions)


def _recorded(model: nn.Module, tokens: Tensor, cache: RecordedCache, last: int, features: Features) -> Tensor:
    """The same from a record of such passes."""

    def compute(block: Tensor) -> tuple[Tensor, ...]:
        with features.of(model):
            logits = _pass(model, block, cache, last)
        return logits, *features.parts

    logits, *parts = cache.replay(model, (last, features.modules), (tokens,), compute)
    features.parts = tuple(parts)
    return logits


def _may_be_recorded(model: nn.Module, tokens: Tensor, cache: RecordedCache) -> bool:
    """Not heads, which are told more than tokens; nor where the output layer grows with the text, at other addresses."""
    known = isinstance(model, PreTrainedModel) and isinstance(model.get_output_embeddings(), nn.Linear)
    return known and cache.records(model, tokens.shape[0])


def _pass(model: nn.Module, tokens: Tensor, cache: Cache, last: int, positions: Tensor | None = None) -> Tensor:
    size = tokens.shape[0]
    limit: dict[str, Any] = {}
    if last < size and _keeps_logits(type(model)):  # type: ignore[arg-type]
        # As a number it would be a slice, for which torch copies the whole output layer where that takes no gradient.
        limit["logits_to_keep"] = torch.arange(size - last, size, device=tokens.device)
    if positions is not None:
        limit["position_ids"] = positions[None]
    output = model(input_ids=tokens[None], past_key_values=cache, use_cache=True, return_dict=True, **limit)
    logits: Tensor = output.logits
    return logits[0, logits.shape[1] - last :]


def readable(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Tokens ``[n]`` as a draft model can read them: a tokenizer may know more than a model has embeddings for."""
    return tokens.clamp_max(model.get_input_embeddings().weight.size(0) - 1)  # type: ignore[operator]


@functools.cache
def _keeps_logits(model: type[nn.Module]) -> bool:
    """Whether a class of models computes only the logits that it is asked for."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters

"""The forward pass on a :class:`~layerskip.models.cache.KVCache` that target, draft view and draft model share.

It writes keys and values after ``cache.length``, which stays. Features are the hidden states of a pass that the output layer
reads; EAGLE calls them so (arXiv 2401.15077).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from layerskip.models.cache import KVCache
from layerskip.models.compiled_layers import path_of_layers
from layerskip.models.graph_capture import CapturingCache, padded_count
from layerskip.models.weights import is_split


class Features:
    """Receives the hidden states ``[n, H]`` of the last pass that the output layer reads: the output of the model's body."""

    states: Tensor


_receivers = weakref.WeakKeyDictionary[nn.Module, Features | None]()


def forward(
    model: nn.Module,
    tokens: Tensor,
    cache: Cache,
    last: int,
    positions: Tensor | None = None,
    features: Features | None = None,
    seen: Tensor | None = None,
    only_largest: bool = False,
) -> Tensor:
    """Return the logits ``[last, V]``, in the model's dtype, of the last tokens of a block that starts at ``cache.length``.

    Tokens are ``[n]`` int64, and so are positions, by default consecutive ones; ``last`` is 0 to n. ``features`` receive the
    pass's hidden states. ``seen`` are the positions ``[1, 1, n, length + n]`` bool that each token sees, where the model's
    attention gets them, too; a pass without the model's ``forward`` needs them beside other positions. With
    ``only_largest``, a pass may compute other logits than the largest of each row inexactly, where that is faster.
    """
    if positions is None and isinstance(cache, CapturingCache) and isinstance(model, PreTrainedModel):
        layer = model.get_output_embeddings()  # heads have none: their passes read more than tokens
        if isinstance(layer, nn.Linear) and cache.captures(model, tokens.shape[0]):
            return _captured_forward(model, tokens, cache, last, features)
    return _forward(model, tokens, cache, last, positions, features, seen, only_largest)


def _captured_forward(
    model: nn.Module, tokens: Tensor, cache: CapturingCache, last: int, features: Features | None
) -> Tensor:
    size, wanted = tokens.shape[0], last
    wide = size if size <= 2 else 4 if size <= 4 else padded_count(size)
    if wide == size or (cache.pads_chains and cache.captures(model, wide)):
        # Few widths are captured, so blocks are followed by copies of their first token, and all rows have logits.
        tokens = tokens if wide == size else torch.cat((tokens, tokens[:1].expand(wide - size)))
        last = min(last, 1) * wide

    def compute(block: Tensor) -> tuple[Tensor, ...]:
        logits = _forward(model, block, cache, last, None, features)
        return (logits,) if features is None else (logits, features.states)

    logits, *states = cache.replay(model, (last, features is None), (tokens,), compute)
    if features is not None:
        features.states = states[0][:size]
    return logits if last == wanted else logits[size - wanted : size]


def _forward(
    model: nn.Module,
    tokens: Tensor,
    cache: Cache,
    last: int,
    positions: Tensor | None,
    features: Features | None,
    seen: Tensor | None = None,
    only_largest: bool = False,
) -> Tensor:
    fused: Any = vars(model).get("cpu_pass")  # of :mod:`layerskip.models.cpu_pass`
    usual = fused is not None and (positions is None or seen is not None) and type(cache) is KVCache
    if usual and (found := fused(model, tokens, cache, last, positions, seen, only_largest)) is not None:
        if features is not None:
            features.states = found[0]
        own: Tensor = found[1]
        return own
    size, options = tokens.shape[0], dict[str, Any]()
    if last < size and _has_logits_to_keep(type(model)):  # type: ignore[arg-type]
        # An int becomes a slice, for which torch copies the whole output layer where that needs no gradient.
        # The output layer of a split model is elsewhere, and indices on the CPU fit everywhere.
        options["logits_to_keep"] = torch.arange(size - last, size, device="cpu" if is_split(model) else tokens.device)
    if positions is not None:
        options["position_ids"] = positions[None]
    with contextlib.nullcontext() if features is None else collecting(model, features):
        output = model(input_ids=tokens[None], past_key_values=cache, use_cache=True, return_dict=True, **options)
    logits: Tensor = output.logits
    return logits[0, logits.shape[1] - last :]


@contextlib.contextmanager
def collecting(model: nn.Module, features: Features) -> Iterator[None]:
    """Let features receive the states of the passes of a causal language model within the ``with`` block."""
    body = body_of(model)
    if body not in _receivers:  # hooked once, because layers on a CPU prepare their calls again after any hook was added
        body.register_forward_hook(receive)
    _receivers[body] = features
    try:
        yield
    finally:
        _receivers[body] = None


def receive(body: nn.Module, _args: Any, output: Any) -> None:
    """Give the output of a body to the features that collect; a hook."""
    if (receiver := _receivers.get(body)) is not None:
        receiver.states = output[0][0]


def body_of(model: nn.Module) -> nn.Module:
    """Return a causal language model without its output layer."""
    name = str(getattr(model, "base_model_prefix", ""))
    # Llama 4's text model names a body that only its multimodal version has.
    return model.get_submodule(name if hasattr(model, name) else (path_of_layers(model) or "").rpartition(".")[0])


def clamp_tokens(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Clamp token ids ``[n]`` to the model's embeddings; a tokenizer may have more tokens than a draft model has rows."""
    return tokens.clamp_max(model.get_input_embeddings().weight.size(0) - 1)  # type: ignore[operator]


@functools.cache
def _has_logits_to_keep(model: type[nn.Module]) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters

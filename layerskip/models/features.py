"""The hidden states of a pass that the output layer reads; EAGLE calls them features (arXiv 2401.15077)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from layerskip.models.compiled_layers import path_of_layers


class Features:
    """Receives the hidden states ``[n, H]`` of the last pass that the output layer reads: the output of the model's body."""

    states: Tensor


_receivers = weakref.WeakKeyDictionary[nn.Module, Features | None]()


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

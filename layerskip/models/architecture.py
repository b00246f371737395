"""Where are a decoder's attention and MLP sub-layers, may they be skipped, and can its cache rewind?

Answered by looking at any Hugging Face model and by trying it, not by a list of architectures: every block is run with both
sub-layers giving zero and must return its input, and the model is run with a rollback in between and must return what it
returns without. What fails is refused by the architecture's name, with the reason.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.device.tolerance import close
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward

_ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")
_MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "shared_mlp", "moe")
_MLP_CLASSES = ("MLP", "FeedForward", "MoE", "Moe")
_PROBE_LENGTH = 8

Form = int | None
"""How a module returns its hidden states: None bare, n as the first of an n-tuple."""


class UnsupportedModel(ValueError):
    """A decoder whose sub-layers cannot be skipped, or whose cache cannot rewind; the message names it and says why."""


@dataclass(frozen=True)
class Block:
    """One decoder layer: the names of the children that make up its sub-layers, and how everything returns."""

    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    form: Form
    child_forms: dict[str, Form]


@dataclass(frozen=True)
class Architecture:
    """Where a model's decoder layers are, and what is in them.

    Args:
        path: the dotted name of the ModuleList that holds the layers.
        blocks: one entry per layer.
    """

    path: str
    blocks: tuple[Block, ...]


_known: weakref.WeakKeyDictionary[nn.Module, Architecture] = weakref.WeakKeyDictionary()
_rewinds: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def architecture(model: PreTrainedModel) -> Architecture:
    """Find and check the sub-layers of a model; each model is checked once.

    Raises:
        UnsupportedModel: a sub-layer cannot be found, or giving zero for it is not skipping it.
    """
    if model not in _known:
        _known[model] = _examine(model)
    return _known[model]


@torch.inference_mode()
def check_rewind(model: PreTrainedModel) -> None:
    """Make sure that the model decodes on a :class:`KVCache`, and that rejected tokens leave no trace in it.

    Raises:
        UnsupportedModel: it does not.
    """
    if model in _rewinds:
        return
    kinds = set(getattr(_config(model), "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
    }
    if kinds:
        raise _refusal(model, f"it has layers of type {', '.join(sorted(kinds))}, whose state cannot rewind")
    tokens = torch.arange(_PROBE_LENGTH, device=model.device) % _config(model).vocab_size
    layers, half = _config(model).num_hidden_layers, _PROBE_LENGTH // 2
    try:
        cache = KVCache(layers, _PROBE_LENGTH, device=model.device)
        fresh = forward(model, tokens, cache, last=half)
        written = cache.is_written
        cache = KVCache(layers, _PROBE_LENGTH, device=model.device)
        forward(model, tokens[:half], cache, last=1)
        cache.length = half
        forward(model, tokens.flip(0)[:half], cache, last=1)  # drafted and rejected
        rewound = forward(model, tokens[half:], cache, last=half)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise _refusal(model, f"it does not decode on a key-value cache that can rewind ({reason})") from error
    if not written:
        raise _refusal(model, "it keeps no keys and values in the cache that it is given, so nothing can rewind")
    if not close(rewound, fresh):
        raise _refusal(model, "its cache does not rewind: rejected tokens change what follows")
    _rewinds.add(model)


@torch.inference_mode()
def _examine(model: PreTrainedModel) -> Architecture:
    check_rewind(model)
    path, layers = _layers(model)
    names = [_children(model, index, layer) for index, layer in enumerate(layers)]
    calls = _watch(model, layers, names)
    blocks = []
    for index, (layer, (attention, mlp)) in enumerate(zip(layers, names, strict=True)):
        if layer not in calls:
            raise _refusal(model, f"layer {index} does not run in a forward pass")
        missing = [child for child in attention + mlp if layer.get_submodule(child) not in calls]
        if missing:
            raise _refusal(model, f"{missing[0]} of layer {index} does not run in a forward pass")
        forms = {child: calls[layer.get_submodule(child)].form for child in attention + mlp}
        block = Block(attention, mlp, calls[layer].form, forms)
        _check_identity(model, index, layer, block, calls[layer])
        blocks.append(block)
    return Architecture(path, tuple(blocks))


def _layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    count = _config(model).num_hidden_layers
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return path, module
    raise _refusal(model, f"it has no list of {count} decoder layers")


def _children(model: PreTrainedModel, index: int, layer: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    attention, mlp = [], []
    for name, child in layer.named_children():
        kind = type(child).__name__
        if "Norm" in kind:  # Qwen3MoeRMSNorm is no mixture of experts
            continue
        if name in _ATTENTION_NAMES or "Attention" in kind:
            attention.append(name)
        elif name in _MLP_NAMES or any(word in kind for word in _MLP_CLASSES):
            mlp.append(name)
    for what, found in (("attention", attention), ("MLP", mlp)):
        if not found:
            raise _refusal(model, f"layer {index} has no child module that is its {what} sub-layer")
    return tuple(attention), tuple(mlp)


@dataclass(frozen=True)
class _Call:
    """What a module was called with, and how it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: Form


def _watch(
    model: PreTrainedModel, layers: nn.ModuleList, names: list[tuple[tuple[str, ...], tuple[str, ...]]]
) -> dict[nn.Module, _Call]:
    """Run the model on two tokens, and note how its layers and their sub-layers are called."""
    calls: dict[nn.Module, _Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls[module] = _Call(args, kwargs, len(output) if isinstance(output, tuple) else None)

    watched = list(layers) + [
        layer.get_submodule(name) for layer, pair in zip(layers, names, strict=True) for name in pair[0] + pair[1]
    ]
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in watched]
    try:
        cache = KVCache(len(layers), _PROBE_LENGTH, device=model.device)
        forward(model, torch.arange(2, device=model.device) % _config(model).vocab_size, cache, last=1)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _check_identity(model: PreTrainedModel, index: int, layer: nn.Module, block: Block, call: _Call) -> None:
    """With both sub-layers giving zero, a block must return its input."""
    hidden = hidden_states(call.args, call.kwargs)
    with _zeroed(layer, block):
        output = layer(*call.args, **call.kwargs)
    returned = output[0] if isinstance(output, tuple) else output
    if returned.shape != hidden.shape or not close(returned, hidden):
        raise _refusal(
            model,
            f"layer {index} is not the identity when both its sub-layers give zero; "
            "it adds the residual, or more, inside them",
        )


@contextmanager
def _zeroed(layer: nn.Module, block: Block) -> Iterator[None]:
    children = [layer.get_submodule(name) for name in block.child_forms]
    try:
        for name, child in zip(block.child_forms, children, strict=True):
            replace_forward(child, block.child_forms[name], torch.zeros_like)
        yield
    finally:
        for child in children:
            del child.__dict__["forward"]


def replace_forward(module: nn.Module, form: Form, make: Callable[[Tensor], Tensor]) -> None:
    """Let a module return ``make(hidden states)`` in its own form, and keep everything else that it is."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return returned(make(hidden_states(args, kwargs)), form)

    module.forward = replacement


def returned(hidden: Tensor, form: Form) -> Any:
    """Hidden states in the form in which a module returns them."""
    return hidden if form is None else (hidden, *[None] * (form - 1))


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among a module's arguments: by name, else the first tensor."""
    found = kwargs.get("hidden_states")
    if found is None:
        found = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    assert isinstance(found, Tensor)
    return found


def _config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _refusal(model: PreTrainedModel, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{type(model).__name__}: {reason}")

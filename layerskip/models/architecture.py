"""Detection of a decoder's attention and MLP sub-layers, and tests that they can be skipped and its cache can rewind.

Support is tested by running the model, not by a list of architectures. Each block runs with both sub-layers at zero and must
return its input. The model runs with a rollback and must return the logits it returns without one. A model that fails is
refused with the name of its architecture and the reason.
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

from layerskip.device.trial import nearly_equal
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
from layerskip.models.placement import input_device
from layerskip.models.quantization import rows_depend

_ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")
_MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "shared_mlp", "moe")
_MLP_CLASSES = ("MLP", "FeedForward", "MoE", "Moe")
_PROBE_LENGTH = 8

Form = int | None
"""The place of the hidden states in a module's result: None for the bare tensor, n for the first item of an n-tuple."""


class UnsupportedModel(ValueError):
    """A decoder whose sub-layers cannot be skipped or whose cache cannot rewind. The message gives name and reason."""


@dataclass(frozen=True)
class Block:
    """The sub-layers of one decoder layer.

    Args:
        attention: names of the child modules that make up the attention sub-layer.
        mlp: names of the child modules that make up the MLP sub-layer.
        form: how the layer returns its hidden states.
        child_forms: how each of the child modules does.
    """

    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    form: Form
    child_forms: dict[str, Form]


@dataclass(frozen=True)
class Architecture:
    """The decoder layers of a model.

    Args:
        path: the dotted name of the ModuleList that holds the layers.
        blocks: one entry per layer.
    """

    path: str
    blocks: tuple[Block, ...]


_known: weakref.WeakKeyDictionary[nn.Module, Architecture] = weakref.WeakKeyDictionary()
_rewinds: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def architecture(model: PreTrainedModel) -> Architecture:
    """Detect and check the sub-layers of a model. Each model is checked once.

    Raises:
        UnsupportedModel: a sub-layer is not found, or replacing its output with zero does not skip it.
    """
    if model not in _known:
        _known[model] = _examine(model)
    return _known[model]


@torch.inference_mode()
def check_rewind(model: PreTrainedModel) -> None:
    """Check that a model decodes on a :class:`KVCache` and that rejected and later tokens do not change its logits.

    Raises:
        UnsupportedModel: the check fails.
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
    device = input_device(model)
    tokens = torch.arange(_PROBE_LENGTH, device=device) % _config(model).vocab_size
    layers, half = _config(model).num_hidden_layers, _PROBE_LENGTH // 2
    try:
        cache = KVCache(layers, _PROBE_LENGTH, device=device)
        expected = forward(model, tokens, cache, last=half)
        written = cache.is_written
        cache = KVCache(layers, _PROBE_LENGTH, device=device)
        forward(model, tokens[:half], cache, last=1)
        cache.length = half
        forward(model, tokens.flip(0)[:half], cache, last=1)  # a rejected draft
        rewound = forward(model, tokens[half:], cache, last=half)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise _refusal(model, f"it does not decode on a key-value cache that can rewind ({reason})") from error
    check_finite(model, expected)
    if (layer := rows_depend(model)) is not None:
        reason = "gives a token another result beside other tokens, so drafting would change the output"
        raise UnsupportedModel(f"target.quantization: {layer} of {type(model).__name__} {reason}")
    if not written:
        raise _refusal(model, "it does not store keys and values in the cache it is given, so it cannot rewind")
    if not nearly_equal(rewound, expected):
        raise _refusal(model, "its cache does not rewind: rejected tokens change later logits")
    _rewinds.add(model)


def check_finite(model: PreTrainedModel, logits: Tensor) -> None:
    """Check that the logits of a self-check have a finite maximum, else its comparison would blame something else.

    Args:
        model: for the error.
        logits: ``[n, V]``.

    Raises:
        UnsupportedModel: the largest logit of a row is NaN or infinite.
    """
    largest = logits.float().amax(-1)
    if not bool(largest.isfinite().all()):
        value = float(largest[~largest.isfinite()][0])
        advice = "check its weights, or try another target.dtype"
        raise _refusal(model, f"the largest logit after some tokens is {value}; {advice}")


@torch.inference_mode()
def _examine(model: PreTrainedModel) -> Architecture:
    check_rewind(model)
    path, layers = _layers(model)
    names = [_children(model, index, layer) for index, layer in enumerate(layers)]
    calls = _record_calls(model, layers, names)
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
        class_name = type(child).__name__
        if "Norm" in class_name:  # such as Qwen3MoeRMSNorm, which is no mixture of experts
            continue
        if name in _ATTENTION_NAMES or "Attention" in class_name:
            attention.append(name)
        elif name in _MLP_NAMES or any(word in class_name for word in _MLP_CLASSES):
            mlp.append(name)
    for kind, children in (("attention", attention), ("MLP", mlp)):
        if not children:
            raise _refusal(model, f"layer {index} has no child module that is its {kind} sub-layer")
    return tuple(attention), tuple(mlp)


@dataclass(frozen=True)
class _Call:
    """The arguments of a module's call and the form of its result."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: Form


def _record_calls(
    model: PreTrainedModel, layers: nn.ModuleList, names: list[tuple[tuple[str, ...], tuple[str, ...]]]
) -> dict[nn.Module, _Call]:
    """Run the model on two tokens and record the calls of its layers and their sub-layers."""
    calls: dict[nn.Module, _Call] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls[module] = _Call(args, kwargs, len(output) if isinstance(output, tuple) else None)

    watched = list(layers) + [
        layer.get_submodule(name) for layer, pair in zip(layers, names, strict=True) for name in pair[0] + pair[1]
    ]
    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in watched]
    try:
        device = input_device(model)
        cache = KVCache(len(layers), _PROBE_LENGTH, device=device)
        forward(model, torch.arange(2, device=device) % _config(model).vocab_size, cache, last=1)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _check_identity(model: PreTrainedModel, index: int, layer: nn.Module, block: Block, call: _Call) -> None:
    """Check that a block with both sub-layers at zero returns its input."""
    hidden = hidden_states(call.args, call.kwargs)
    with _zeroed(layer, block):
        output = layer(*call.args, **call.kwargs)
    result = output[0] if isinstance(output, tuple) else output
    if result.shape != hidden.shape or not nearly_equal(result, hidden):
        raise _refusal(
            model,
            f"layer {index} is not the identity with both sub-layers at zero; it adds the residual, or more, inside them",
        )


@contextmanager
def _zeroed(layer: nn.Module, block: Block) -> Iterator[None]:
    children = [layer.get_submodule(name) for name in block.child_forms]
    replaced = [vars(child).get("forward") for child in children]  # by a hook of accelerate
    try:
        for name, child in zip(block.child_forms, children, strict=True):
            replace_forward(child, block.child_forms[name], torch.zeros_like)
        yield
    finally:
        for child, forward in zip(children, replaced, strict=True):
            if forward is None:
                del child.__dict__["forward"]
            else:
                child.forward = forward


def replace_forward(module: nn.Module, form: Form, function: Callable[[Tensor], Tensor]) -> None:
    """Replace a module's forward pass by a function of its hidden states, returned in the module's own form."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return as_output(function(hidden_states(args, kwargs)), form)

    module.forward = replacement


def as_output(hidden: Tensor, form: Form) -> Any:
    """Return hidden states in the form in which a module returns its output."""
    return hidden if form is None else (hidden, *[None] * (form - 1))


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states among a module's arguments: by name, else the first tensor."""
    hidden = kwargs.get("hidden_states")
    if hidden is None:
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    assert isinstance(hidden, Tensor)
    return hidden


def _config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _refusal(model: PreTrainedModel, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{type(model).__name__}: {reason}")

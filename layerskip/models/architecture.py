"""Detection of a decoder's attention and MLP sub-layers, and tests that they can be skipped and its cache can rewind.

Support is tested by running the model, not by a list of architectures. Each block runs with both sub-layers at zero and must
return its input. The model runs with a rollback and must return the logits it returns without one.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.device.trial import nearly_equal
from layerskip.models.cache import KVCache
from layerskip.models.compiled_layers import path_of_layers
from layerskip.models.forward import forward
from layerskip.models.weights import input_device, rows_depend

_ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")
_MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "shared_mlp", "moe")
_MLP_CLASSES = ("MLP", "FeedForward", "MoE", "Moe")
_REWINDABLE = {"full_attention", "sliding_attention", "chunked_attention"}
_PROBE_LENGTH = 8
_OTHER_SIZE = 0.5  # the relative difference of logits in half precision between passes of other sizes, at most

Form = int | None
"""The place of the hidden states in a module's result: None for the bare tensor, n for the first item of an n-tuple."""


class UnsupportedModel(ValueError):
    """A decoder whose sub-layers cannot be skipped or whose cache cannot rewind. The message gives name and reason."""


@dataclass(frozen=True)
class Block:
    """One decoder layer: the child modules of its attention and MLP sub-layers, its form and theirs."""

    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    form: Form
    child_forms: dict[str, Form]


@dataclass(frozen=True)
class Architecture:
    """The decoder layers of a model: the dotted name of their ModuleList, and one block per layer."""

    path: str
    blocks: tuple[Block, ...]


_known: weakref.WeakKeyDictionary[nn.Module, Architecture] = weakref.WeakKeyDictionary()
_rewinds: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@torch.inference_mode()
def architecture(model: PreTrainedModel) -> Architecture:
    """Detect and check the sub-layers of a model, once; :class:`UnsupportedModel` if they cannot be skipped."""
    if model in _known:
        return _known[model]
    check_rewind(model)
    if (path := path_of_layers(model)) is None:
        raise _refusal(model, "it has no list of all its decoder layers")
    layers, blocks = list(model.get_submodule(path).children()), []
    calls = _record_calls(model, layers)
    for index, layer in enumerate(layers):
        attention, mlp = _sublayers(model, index, layer)
        children = {name: layer.get_submodule(name) for name in attention + mlp}
        if not calls.keys() >= {layer, *children.values()}:
            raise _refusal(model, f"layer {index}, or one of its sub-layers, does not run in a forward pass")
        forms = {name: calls[child].form for name, child in children.items()}
        blocks.append(Block(attention, mlp, calls[layer].form, forms))
        if not _is_identity_without(layer, blocks[-1], calls[layer]):
            added = "it adds the residual, or more, inside them"
            raise _refusal(model, f"layer {index} is not the identity with both sub-layers at zero; {added}")
    _known[model] = Architecture(path, tuple(blocks))
    return _known[model]


@torch.inference_mode()
def check_rewind(model: PreTrainedModel) -> None:
    """Raise :class:`UnsupportedModel` unless a model decodes on a :class:`KVCache`, also after rejected tokens."""
    if model in _rewinds:
        return
    config = model.config.get_text_config(decoder=True)
    if kinds := {*(getattr(config, "layer_types", None) or ())} - _REWINDABLE:
        raise _refusal(model, f"it has layers of type {', '.join(sorted(kinds))}, whose state cannot rewind")
    device = input_device(model)
    # Spread, because the first tokens are often untrained special ones, which amplify rounding errors.
    tokens = (2 * torch.arange(_PROBE_LENGTH, device=device) + 1) * config.vocab_size // (2 * _PROBE_LENGTH)
    whole, cache = (KVCache(config.num_hidden_layers, _PROBE_LENGTH, device=device) for _ in range(2))
    half = _PROBE_LENGTH // 2
    try:
        expected = forward(model, tokens, whole, last=half)
        forward(model, tokens[:half], cache, last=1)
        cache.length = half
        straight, _, rewound = (  # between the two, a rejected draft
            forward(model, block, cache, last=half) for block in (tokens[half:], tokens.flip(0)[:half], tokens[half:])
        )
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise _refusal(model, f"it does not decode on a key-value cache that can rewind ({reason})") from error
    check_finite(model, expected)
    if (layer := rows_depend(model)) is not None:
        reason = "gives a token another result beside other tokens, so drafting would change the output"
        raise UnsupportedModel(f"target.quantization: {layer} of {type(model).__name__} {reason}")
    if not whole.buffers():
        raise _refusal(model, "it does not store keys and values in the cache it is given, so it cannot rewind")
    if not nearly_equal(rewound, straight):
        raise _refusal(model, "its cache does not rewind: rejected tokens change later logits")
    # In half precision, a pass of another size differs much by rounding alone, yet less than one without the cache.
    if not nearly_equal(straight, expected, None if model.dtype == torch.float32 else _OTHER_SIZE):
        raise _refusal(model, "its cache does not rewind: tokens before a pass do not count as in one pass")
    _rewinds.add(model)


def check_finite(model: PreTrainedModel, logits: Tensor) -> None:
    """Raise :class:`UnsupportedModel` for self-check logits ``[n, V]`` of which a row has no finite maximum."""
    largest = logits.float().amax(-1).tolist()
    if wrong := [value for value in largest if not math.isfinite(value)]:
        advice = "check its weights, or try another target.dtype"
        raise _refusal(model, f"the largest logit after some tokens is {wrong[0]}; {advice}")


def _sublayers(model: PreTrainedModel, index: int, layer: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the children of a layer that are its attention and its MLP."""
    attention, mlp = [], []
    for name, child in layer.named_children():
        class_name = type(child).__name__
        if "Norm" in class_name:  # such as Qwen3MoeRMSNorm, which is no mixture of experts
            continue
        if name in _ATTENTION_NAMES or "Attention" in class_name:
            attention.append(name)
        elif name in _MLP_NAMES or any(word in class_name for word in _MLP_CLASSES):
            mlp.append(name)
    if not attention or not mlp:
        missing = "MLP" if attention else "attention"
        raise _refusal(model, f"layer {index} has no child module that is its {missing} sub-layer")
    return tuple(attention), tuple(mlp)


class _Call(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: Form


def _record_calls(model: PreTrainedModel, layers: list[nn.Module]) -> dict[nn.Module, _Call]:
    """Run the model on two tokens and record the calls of its layers and their children."""
    calls: dict[nn.Module, _Call] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls[module] = _Call(args, kwargs, len(output) if isinstance(output, tuple) else None)

    watched = [module for layer in layers for module in (layer, *layer.children())]
    with contextlib.ExitStack() as hooks:
        for module in watched:
            hooks.enter_context(module.register_forward_hook(record, with_kwargs=True))
        forward(model, torch.arange(2, device=input_device(model)), KVCache(len(layers), _PROBE_LENGTH), last=1)
    return calls


def _is_identity_without(layer: nn.Module, block: Block, call: _Call) -> bool:
    """Return whether a layer with both sub-layers at zero returns its input."""
    hidden = hidden_states(call.args, call.kwargs)
    children = [layer.get_submodule(name) for name in block.child_forms]
    replaced = [vars(child).get("forward") for child in children]  # by a hook of accelerate
    try:
        for child, form in zip(children, block.child_forms.values(), strict=True):
            replace_forward(child, form, torch.zeros_like)
        output = layer(*call.args, **call.kwargs)
    finally:
        for child, own in zip(children, replaced, strict=True):
            del child.forward
            if own is not None:
                child.forward = own
    result = output[0] if isinstance(output, tuple) else output
    return bool(result.shape == hidden.shape and nearly_equal(result, hidden))


def replace_forward(module: nn.Module, form: Form, function: Callable[[Tensor], Tensor]) -> None:
    """Replace a module's forward pass by a function of its hidden states, returned in the module's own form."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return as_output(function(hidden_states(args, kwargs)), form)

    replacement.skips = True  # type: ignore[attr-defined]
    module.forward = replacement


def is_skipped(module: nn.Module) -> bool:
    """Return whether :func:`replace_forward` has replaced a module's forward pass: zeros, or a layer by its input."""
    return hasattr(vars(module).get("forward"), "skips")


def as_output(hidden: Tensor, form: Form) -> Any:
    """Return hidden states in the form in which a module returns its output."""
    return hidden if form is None else (hidden, *[None] * (form - 1))


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states among a module's arguments: by name, else the first tensor."""
    candidates = (kwargs.get("hidden_states"), *args, *kwargs.values())
    return next(value for value in candidates if isinstance(value, Tensor))


def _refusal(model: PreTrainedModel, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{type(model).__name__}: {reason}")

"""Detection of a decoder's attention and MLP sub-layers, and tests that they can be skipped and its cache can rewind.

Support is tested by running the model, not by a list of architectures. Each block runs with both sub-layers at zero and must
return its input. The model runs with a rollback and must return the logits it returns without one. A model that fails is
refused with the name of its architecture and the reason.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
_SKIPS = "skips"
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
    path = path_of_layers(model)
    if path is None:
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        raise _refusal(model, f"it has no list of {count} decoder layers")
    layers, blocks = list(model.get_submodule(path).children()), []
    calls = _record_calls(model, layers)
    for index, layer in enumerate(layers):
        attention, mlp = _sublayers(model, index, layer)
        if layer not in calls:
            raise _refusal(model, f"layer {index} does not run in a forward pass")
        missing = [child for child in attention + mlp if layer.get_submodule(child) not in calls]
        if missing:
            raise _refusal(model, f"{missing[0]} of layer {index} does not run in a forward pass")
        forms = {child: calls[layer.get_submodule(child)].form for child in attention + mlp}
        blocks.append(Block(attention, mlp, calls[layer].form, forms))
        if not _is_identity_without(layer, blocks[-1], calls[layer]):
            added = "it adds the residual, or more, inside them"
            raise _refusal(model, f"layer {index} is not the identity with both sub-layers at zero; {added}")
    _known[model] = Architecture(path, tuple(blocks))
    return _known[model]


@torch.inference_mode()
def check_rewind(model: PreTrainedModel) -> None:
    """Check that a model decodes on a :class:`KVCache` and that rejected and later tokens do not change its logits.

    A model that fails raises :class:`UnsupportedModel`.
    """
    if model in _rewinds:
        return
    config = model.config.get_text_config(decoder=True)
    kinds = {*(getattr(config, "layer_types", None) or ())} - _REWINDABLE
    if kinds:
        raise _refusal(model, f"it has layers of type {', '.join(sorted(kinds))}, whose state cannot rewind")
    device = input_device(model)
    # Spread, because the first tokens are often untrained special ones, which amplify rounding errors.
    tokens = (2 * torch.arange(_PROBE_LENGTH, device=device) + 1) * config.vocab_size // (2 * _PROBE_LENGTH)
    layers, half = config.num_hidden_layers, _PROBE_LENGTH // 2
    try:
        cache = KVCache(layers, _PROBE_LENGTH, device=device)
        expected = forward(model, tokens, cache, last=half)
        written = bool(cache.buffers())
        cache = KVCache(layers, _PROBE_LENGTH, device=device)
        forward(model, tokens[:half], cache, last=1)
        passes = []
        for block in (tokens[half:], tokens.flip(0)[:half], tokens[half:]):  # between the two, a rejected draft
            cache.length = half
            passes.append(forward(model, block, cache, last=half))
        straight, _, rewound = passes
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise _refusal(model, f"it does not decode on a key-value cache that can rewind ({reason})") from error
    check_finite(model, expected)
    if (layer := rows_depend(model)) is not None:
        reason = "gives a token another result beside other tokens, so drafting would change the output"
        raise UnsupportedModel(f"target.quantization: {layer} of {type(model).__name__} {reason}")
    if not written:
        raise _refusal(model, "it does not store keys and values in the cache it is given, so it cannot rewind")
    if not nearly_equal(rewound, straight):
        raise _refusal(model, "its cache does not rewind: rejected tokens change later logits")
    # In half precision, a pass of another size differs much by rounding alone, yet less than one without the cache.
    if not nearly_equal(straight, expected, None if model.dtype == torch.float32 else _OTHER_SIZE):
        raise _refusal(model, "its cache does not rewind: tokens before a pass do not count as in one pass")
    _rewinds.add(model)


def check_finite(model: PreTrainedModel, logits: Tensor) -> None:
    """Raise :class:`UnsupportedModel` for self-check logits ``[n, V]`` of which a row has no finite maximum."""
    largest = logits.float().amax(-1)
    if not bool(largest.isfinite().all()):
        value = float(largest[~largest.isfinite()][0])
        advice = "check its weights, or try another target.dtype"
        raise _refusal(model, f"the largest logit after some tokens is {value}; {advice}")


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


def _record_calls(model: PreTrainedModel, layers: list[nn.Module]) -> dict[nn.Module, _Call]:
    """Run the model on two tokens and record the calls of its layers and their children."""
    calls: dict[nn.Module, _Call] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls[module] = _Call(args, kwargs, len(output) if isinstance(output, tuple) else None)

    watched = [module for layer in layers for module in (layer, *layer.children())]
    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in watched]
    try:
        device = input_device(model)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        cache = KVCache(len(layers), _PROBE_LENGTH, device=device)
        forward(model, torch.arange(2, device=device) % vocabulary, cache, last=1)
    finally:
        for hook in hooks:
            hook.remove()
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
            if own is None:
                del child.__dict__["forward"]
            else:
                child.forward = own
    result = output[0] if isinstance(output, tuple) else output
    return bool(result.shape == hidden.shape and nearly_equal(result, hidden))


def replace_forward(module: nn.Module, form: Form, function: Callable[[Tensor], Tensor]) -> None:
    """Replace a module's forward pass by a function of its hidden states, returned in the module's own form."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return as_output(function(hidden_states(args, kwargs)), form)

    setattr(replacement, _SKIPS, True)
    module.forward = replacement


def is_skipped(module: nn.Module) -> bool:
    """Return whether :func:`replace_forward` has replaced a module's forward pass: zeros, or a layer by its input."""
    return hasattr(vars(module).get("forward"), _SKIPS)


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


def _refusal(model: PreTrainedModel, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{type(model).__name__}: {reason}")

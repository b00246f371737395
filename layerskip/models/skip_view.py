"""Views of a model with skipped sub-layers, without a copy of its weights or of its modelling code.

A view is a second tree of modules over the same tensors: ``copy.deepcopy`` with every parameter and buffer already in its
memo. In the view, a skipped sub-layer returns zeros or the output of its replacement. A wholly skipped layer returns its
input; the first layer of a replaced run adds the replacement's output. Nothing else changes, so layer indices, cache
entries, and each model family's own masks and positions stay as they are.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.mask import Gap, MaskError, SkipMask
from layerskip.models.architecture import architecture, replace_forward
from layerskip.models.attention import use_grouped_attention
from layerskip.models.compiled_layers import compile_like, compile_mode
from layerskip.models.packing import drop_stale_packing, pack_like, uses_packing

T = TypeVar("T")
_SHARED = ("AlignDevicesHook", "SequentialHook", "MatmulLtState", "QuantState")
"""Attributes of modules, by type, that hold weights: hooks of accelerate, and states of bitsandbytes."""
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters")


class Replacements(Protocol):
    """Modules in place of the skipped sub-layers of one mask."""

    def items(self) -> Sequence[tuple[Gap, nn.Module]]:
        """Return every replaced gap with its module: from hidden states ``[..., H]`` to what is added in its place."""


def skip_view(model: PreTrainedModel, mask: SkipMask, replacements: Replacements | None = None) -> PreTrainedModel:
    """Make a view of a model that skips the sub-layers of a mask. It shares every weight; the model does not change.

    Args:
        model: a decoder.
        mask: the sub-layers to skip.
        replacements: of the mask; None for empty skips.

    Raises:
        UnsupportedModel: the model's sub-layers cannot be skipped.
        MaskError: the mask is for another number of layers.
    """
    detected = architecture(model)
    if mask.layers != len(detected.blocks):
        raise MaskError(f"mask: is for {mask.layers} layers; {type(model).__name__} has {len(detected.blocks)}")
    spans = {(gap.kind, gap.first): module for gap, module in (() if replacements is None else replacements.items())}
    view = shared_copy(model)
    layers = view.get_submodule(detected.path)
    for index, block in enumerate(detected.blocks):
        layer = layers.get_submodule(str(index))
        if mask.attention[index] and mask.mlp[index]:
            replace_forward(layer, block.form, _skipped_layer(spans.get(("layers", index))))
            continue
        for kind in ("attention", "mlp"):
            names: tuple[str, ...] = getattr(block, kind) if getattr(mask, kind)[index] else ()
            for place, name in enumerate(names):  # of several modules in a sub-layer, the first is replaced
                span = spans.get((kind, index)) if place == 0 else None
                replace_forward(layer.get_submodule(name), block.child_forms[name], span or torch.zeros_like)
    return view


def cached_skip_view(model: PreTrainedModel, mask: SkipMask) -> PreTrainedModel:
    """Return the view of a mask, cached until another mask is requested, so that its captured passes are reused."""
    cached = _skip_views.of(model)
    view = cached.get(mask) or skip_view(model, mask)
    cached.clear()
    cached[mask] = view
    return view


def decoding_view(model: PreTrainedModel) -> PreTrainedModel:
    """Return the view of the whole model that decodes: all weights shared, with the attention for verification.

    It is made once per model, and again when the model's tensors were replaced, as by a move to another device. Packed
    copies of weights that have changed since the last call are dropped.
    """
    view = _decoding_views.of(model)
    drop_stale_packing(view)
    return view


class OncePerModel(Generic[T]):
    """A value computed once per model, and again when the model's tensors, dtype, hooks, adapters or packing change.

    Args:
        make: computes the value, which must not hold a reference to the model.
    """

    def __init__(self, make: Callable[[PreTrainedModel], T]) -> None:
        self._make = make
        self._values: weakref.WeakKeyDictionary[PreTrainedModel, tuple[tuple[object, ...], T]] = weakref.WeakKeyDictionary()

    def of(self, model: PreTrainedModel) -> T:
        """Return the value for a model in its present state."""
        tensors = (id(t) for t in (*model.parameters(), *model.buffers()))
        state = uses_packing(model), compile_mode(model), model.dtype, *tensors, *_hooks_and_adapters(model)
        if model not in self._values or self._values[model][0] != state:
            self._values[model] = state, self._make(model)
        return self._values[model][1]


def _hooks_and_adapters(model: PreTrainedModel) -> list[object]:
    """Return the hooks and the active PEFT adapters, which change a forward pass without being tensors."""
    parts: list[object] = []
    for module in model.modules():
        parts += (*module._forward_pre_hooks, *module._forward_hooks)
        parts += [str(module.__dict__[name]) for name in _ADAPTERS if name in module.__dict__]
    return parts


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a second tree of modules over the model's own tensors, with attention and linear layers for verification."""
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    parts = (part for module in model.modules() for part in vars(module).values())
    shared |= {id(part): part for part in parts if type(part).__name__ in _SHARED}
    view = copy.deepcopy(model, shared)
    for name in ("to", "cuda"):
        view.__dict__.pop(name, None)  # replaced by accelerate on a model with hooks; they hold the model
    use_grouped_attention(view)
    compile_like(model, view)
    return pack_like(model, view)


def _skipped_layer(module: nn.Module | None) -> Callable[[Tensor], Tensor]:
    """Return the function of a wholly skipped layer: the identity, plus a module's output where a replaced run begins."""
    return (lambda hidden: hidden) if module is None else (lambda hidden: hidden + module(hidden))


_decoding_views = OncePerModel(shared_copy)
_skip_views: OncePerModel[dict[SkipMask, PreTrainedModel]] = OncePerModel(lambda _: {})

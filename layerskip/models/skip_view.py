"""Views of a model by a draft plan, without a copy of its weights as they are stored or of its modelling code.

A view is a second tree of modules over the same tensors. In it, a skipped sub-layer returns zeros, and a wholly skipped
layer returns its input. Layer indices, cache entries, and each model family's own masks and positions stay as they are.
Linear layers that read fewer bits share one copy per weight and format.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from layerskip.draft_plan import BITS, DraftPlan, PlanError
from layerskip.models.architecture import Architecture, UnsupportedModel, architecture, replace_forward
from layerskip.models.attention import use_grouped_attention
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import generation_lock
from layerskip.models.compiled_layers import compile_mode, set_compiling
from layerskip.models.cpu_layers import fuse_layers, is_whole_layer
from layerskip.models.cpu_pass import fuse_pass
from layerskip.models.forward import forward
from layerskip.models.packing import (
    copy_bytes,
    drop_stale_packing,
    pack_like,
    packable_layers,
    read_at,
    refuse_quantized,
    uses_packing,
    weigh_inputs,
)

T = TypeVar("T")
_SHARED = ("AlignDevicesHook", "SequentialHook", "MatmulLtState", "QuantState")
"""Attributes of modules, by type, that hold weights: hooks of accelerate, and states of bitsandbytes."""
_STEPS = (2, 1, 1, 1)  # tokens: keys and values are allocated, then parts, layers and their order become known
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters")


def skip_view(model: PreTrainedModel, plan: DraftPlan) -> PreTrainedModel:
    """Make a view of a model that skips sub-layers and reads weights as a plan says; the model does not change.

    Raises:
        UnsupportedModel: its sub-layers cannot be skipped, or products at fewer bits are no faster for it.
        PlanError: the plan is for another number of layers.
    """
    if plan.formats and (reason := refuse_quantized(model)):
        raise UnsupportedModel(f"{type(model).__name__}: {reason}")
    detected = _detected(model, plan)
    view = _copied(model)
    read_bits(model, view, detected, plan)
    if detected is None:
        return _learned(view)
    layers = view.get_submodule(detected.path)
    for index, block in enumerate(detected.blocks):
        layer = layers.get_submodule(str(index))
        if plan.attention[index] and plan.mlp[index]:
            replace_forward(layer, block.form, lambda hidden: hidden)
            continue
        for name in (block.attention if plan.attention[index] else ()) + (block.mlp if plan.mlp[index] else ()):
            replace_forward(layer.get_submodule(name), block.child_forms[name], torch.zeros_like)
    return _learned(view)


def _detected(model: PreTrainedModel, plan: DraftPlan) -> Architecture | None:
    """Return the sub-layers of a model; None for a format of all of them, which needs none."""
    if plan.formats and len(set(plan.sublayer_bits)) == 1 and not any((*plan.attention, *plan.mlp)):
        return None
    detected = architecture(model)
    if plan.layers != len(detected.blocks):
        raise PlanError(f"the plan is for {plan.layers} layers; {type(model).__name__} has {len(detected.blocks)}")
    return detected


def read_bits(model: PreTrainedModel, view: PreTrainedModel, detected: Architecture | None, plan: DraftPlan) -> None:
    """Let the linear layers of a view of a model read the bits of a plan; ``detected`` may be None for one format."""
    if plan.formats:
        with generation_lock(model):  # hooks are on its layers meanwhile
            weigh_inputs(model)
    for part, bits in _parts(view, detected, plan):
        read_at(part, bits)


def _parts(tree: PreTrainedModel, detected: Architecture | None, plan: DraftPlan) -> Iterator[tuple[nn.Module, int]]:
    """Yield the parts of a module tree with the bits that a plan reads them at; a later part may be within an earlier."""
    if detected is None:
        yield tree, plan.sublayer_bits[0]
    else:
        for index, block in enumerate(detected.blocks):
            layer = tree.get_submodule(f"{detected.path}.{index}")
            for names, bits in ((block.attention, plan.attention_bits), (block.mlp, plan.mlp_bits)):
                yield from ((layer.get_submodule(name), bits[index]) for name in names)
    yield tree.get_output_embeddings(), plan.head_bits


def copies_bytes(model: PreTrainedModel, plans: Iterable[DraftPlan]) -> dict[str, int]:
    """Return the bytes of the copies of a model's weights that drafts by some plans share, by format.

    A copy that is not made yet counts with the bytes that it will take.
    """
    copies: dict[tuple[int, int], int] = {}
    for plan in plans:
        parts = _parts(model, _detected(model, plan), plan) if plan.formats else ()
        read = {layer: bits for part, bits in parts for layer in packable_layers(part)}
        copies |= {(id(layer.weight), bits): copy_bytes(layer.weight, bits) for layer, bits in read.items() if bits}
    return {name: sum(size for (_, own), size in copies.items() if own == bits) for name, bits in BITS.items() if bits}


def cached_skip_view(model: PreTrainedModel, plan: DraftPlan) -> PreTrainedModel:
    """Return the view of a plan, so that its captured passes are reused: the last of masks, and of every set of formats."""
    cached = _skip_views.of(model)
    key = tuple(sorted(plan.formats))
    if (view := cached.get(key)) is None or view[0] != plan:
        cached[key] = view = plan, skip_view(model, plan)
    return view[1]


def decoding_view(model: PreTrainedModel) -> PreTrainedModel:
    """Return the view of the whole model that decodes: all weights shared, with the attention for verification.

    It is made once per state of the model. Packed copies of weights that have changed since the last call are dropped.
    """
    view = _decoding_views.of(model)
    drop_stale_packing(view)
    return view


class OncePerModel(Generic[T]):
    """A value computed once per state of a model, to which it must not refer: tensors, dtype, hooks, adapters, packing."""

    def __init__(self, make: Callable[[PreTrainedModel], T]) -> None:
        self._make = make
        self._values: weakref.WeakKeyDictionary[PreTrainedModel, tuple[list[object], T]] = weakref.WeakKeyDictionary()

    def of(self, model: PreTrainedModel) -> T:
        state: list[object] = [uses_packing(model), compile_mode(model), model.dtype]
        state += map(id, (*model.parameters(), *model.buffers()))
        for module in model.modules():  # hooks and active PEFT adapters change a forward pass without being tensors
            state += (*module._forward_pre_hooks, *module._forward_hooks)
            state += (str(module.__dict__[name]) for name in _ADAPTERS if name in module.__dict__)
        if model not in self._values or self._values[model][0] != state:
            self._values[model] = state, self._make(model)
        return self._values[model][1]


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a second tree of modules over the model's own tensors, with attention and linear layers for verification."""
    return _learned(_copied(model))


def _copied(model: PreTrainedModel) -> PreTrainedModel:
    parts = (part for module in model.modules() for part in vars(module).values() if type(part).__name__ in _SHARED)
    shared: dict[int, Any] = {id(part): part for part in (*model.parameters(), *model.buffers(), *parts)}
    view = copy.deepcopy(model, shared)
    for name in ("to", "cuda"):
        view.__dict__.pop(name, None)  # replaced by accelerate on a model with hooks; they hold the model
    use_grouped_attention(view)
    set_compiling(view, compile_mode(model))
    return fuse_layers(pack_like(model, view))


def _learned(view: PreTrainedModel) -> PreTrainedModel:
    """Run a few steps of a view whose layers may run in few calls, so that its first text is computed as later ones are."""
    if any(map(is_whole_layer, view.modules())) and not view.training:
        text = view.config.get_text_config(decoder=True)
        cache = KVCache(text.num_hidden_layers, sum(_STEPS) + 2)
        with torch.inference_mode():
            for count in _STEPS:
                tokens = torch.arange(1, count + 1) + cache.length
                forward(view, tokens % text.vocab_size, cache, 1)
                cache.length += count
            fuse_pass(view, torch.arange(1, 3), cache)
    return view


_decoding_views = OncePerModel(shared_copy)
_skip_views: OncePerModel[dict[tuple[int, ...], tuple[DraftPlan, PreTrainedModel]]] = OncePerModel(lambda _: {})

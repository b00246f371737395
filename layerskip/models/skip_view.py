"""How does a model run with sub-layers skipped, without a copy of its weights or of its modelling code?

A view is a second tree of modules over the same tensors: ``copy.deepcopy`` with every parameter and buffer already in its
memo. In the copy, a skipped sub-layer returns zeros, or what a bridge gives for it, and a wholly skipped layer returns its
input, to which the bridge of its run is added where the run begins; nothing else changes, so layer indices, cache entries
and each family's own masks and positions stay as they are.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from layerskip.mask import MaskError, SkipMask
from layerskip.models.architecture import architecture, replace_forward
from layerskip.models.attention import use_grouped_attention
from layerskip.models.bridge import Bridge, Bridges
from layerskip.models.packing import packed_like, packs, refresh

T = TypeVar("T")
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters")


def skip_view(model: PreTrainedModel, mask: SkipMask, bridges: Bridges | None = None) -> PreTrainedModel:
    """The model with the mask's sub-layers skipped; it shares every weight, and the model itself stays as it is.

    Args:
        model: a decoder.
        mask: one flag per layer and sub-layer.
        bridges: what stands in for them; None for nothing.

    Raises:
        UnsupportedModel: the model's sub-layers cannot be skipped.
        MaskError: the mask is for another number of layers.
        ConfigError: the bridges are of another mask.
    """
    found = architecture(model)
    if mask.layers != len(found.blocks):
        raise MaskError(f"mask: is for {mask.layers} layers; {type(model).__name__} has {len(found.blocks)}")
    if bridges is not None:
        bridges.check(mask)
    spans = {} if bridges is None else {(gap.kind, gap.first): bridges.of(gap) for gap in mask.gaps}
    view = twin(model)
    layers = view.get_submodule(found.path)
    for index, block in enumerate(found.blocks):
        layer = layers.get_submodule(str(index))
        if mask.attention[index] and mask.mlp[index]:
            replace_forward(layer, block.form, _crossing(spans.get(("layers", index))))
            continue
        for kind in ("attention", "mlp"):
            names: tuple[str, ...] = getattr(block, kind) if getattr(mask, kind)[index] else ()
            for place, name in enumerate(names):  # one of several that make up a sub-layer stands in for all
                span = spans.get((kind, index)) if place == 0 else None
                replace_forward(layer.get_submodule(name), block.child_forms[name], span or torch.zeros_like)
    return view


def kept_skip_view(model: PreTrainedModel, mask: SkipMask) -> PreTrainedModel:
    """The same one for as long as nobody asks for another mask, so that what is recorded of its passes serves again."""
    kept = _skip_views.of(model)
    view = kept.get(mask) or skip_view(model, mask)
    kept.clear()
    kept[mask] = view
    return view


def decoding_view(model: PreTrainedModel) -> PreTrainedModel:
    """The whole model, sharing every weight, with the attention that suits verification.

    Made once per model, and again when the model's tensors are others, as after a move to another device. Weights that were
    changed since the last call are multiplied by as they are now.
    """
    view = _decoding_views.of(model)
    refresh(view)
    return view


class OncePerModel(Generic[T]):
    """Something made of a model, once, and again when the model's tensors are others, or laid out otherwise.

    Args:
        make: makes it; what it makes must not hold the model itself.
    """

    def __init__(self, make: Callable[[PreTrainedModel], T]) -> None:
        self._make = make
        self._made: weakref.WeakKeyDictionary[PreTrainedModel, tuple[tuple[object, ...], T]] = weakref.WeakKeyDictionary()

    def of(self, model: PreTrainedModel) -> T:
        """What was made of this model as it is, hooks and adapters on it included."""
        tensors = (id(t) for t in (*model.parameters(), *model.buffers()))
        made_of = packs(model), model.dtype, *tensors, *_attached(model)
        if model not in self._made or self._made[model][0] != made_of:
            self._made[model] = made_of, self._make(model)
        return self._made[model][1]


def _attached(model: PreTrainedModel) -> list[object]:
    """What changes a pass and is no tensor: hooks, and which adapters of PEFT's are at work."""
    found: list[object] = []
    for module in model.modules():
        found += (*module._forward_pre_hooks, *module._forward_hooks)
        found += [str(module.__dict__[name]) for name in _ADAPTERS if name in module.__dict__]
    return found


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A second tree of modules over the model's own tensors, with attention and products that suit verification."""
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    use_grouped_attention(twin)
    return packed_like(model, twin)


def _crossing(bridge: Bridge | None) -> Callable[[Tensor], Tensor]:
    """What a wholly skipped layer does: nothing, or where a run begins what stands in for the run."""
    return (lambda hidden: hidden) if bridge is None else (lambda hidden: hidden + bridge(hidden))


_decoding_views = OncePerModel(twin)
_skip_views: OncePerModel[dict[SkipMask, PreTrainedModel]] = OncePerModel(lambda _: {})

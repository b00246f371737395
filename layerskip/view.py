"""How does a model run with sub-layers skipped, without a copy of its weights or of its modelling code?

A view is a second tree of modules over the same tensors: ``copy.deepcopy`` with every parameter and buffer already in its
memo. In the copy, a skipped sub-layer returns zeros and a wholly skipped layer returns its input; nothing else changes, so
layer indices, cache entries and each family's own masks and positions stay as they are.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .anatomy import anatomy, replace_forward
from .attention import use_grouped_attention
from .mask import MaskError, SkipMask

T = TypeVar("T")


def skip_view(model: PreTrainedModel, mask: SkipMask) -> PreTrainedModel:
    """The model with the mask's sub-layers skipped; it shares every weight, and the model itself stays as it is.

    Args:
        model: a decoder.
        mask: one flag per layer and sub-layer.

    Raises:
        UnsupportedModel: the model's sub-layers cannot be skipped.
        MaskError: the mask is for another number of layers.
    """
    found = anatomy(model)
    if mask.layers != len(found.blocks):
        raise MaskError(f"mask: is for {mask.layers} layers; {type(model).__name__} has {len(found.blocks)}")
    view = twin(model)
    layers = view.get_submodule(found.path)
    for index, block in enumerate(found.blocks):
        layer = layers.get_submodule(str(index))
        if mask.attention[index] and mask.mlp[index]:
            replace_forward(layer, block.form, _unchanged)
            continue
        skipped = block.attention * mask.attention[index] + block.mlp * mask.mlp[index]
        for name in skipped:
            replace_forward(layer.get_submodule(name), block.child_forms[name], torch.zeros_like)
    return view


def decoding_view(model: PreTrainedModel) -> PreTrainedModel:
    """The whole model, sharing every weight, with the attention that suits verification.

    Made once per model, and again when the model's tensors are others, as after a move to another device.
    """
    return _decoding_views.of(model)


class OncePerModel(Generic[T]):
    """Something made of a model, once, and again when the model's tensors are others.

    Args:
        make: makes it; what it makes must not hold the model itself.
    """

    def __init__(self, make: Callable[[PreTrainedModel], T]) -> None:
        self._make = make
        self._made: weakref.WeakKeyDictionary[PreTrainedModel, tuple[tuple[int, ...], T]] = weakref.WeakKeyDictionary()

    def of(self, model: PreTrainedModel) -> T:
        """What was made of this model."""
        tensors = tuple(id(t) for t in (*model.parameters(), *model.buffers()))
        if model not in self._made or self._made[model][0] != tensors:
            self._made[model] = tensors, self._make(model)
        return self._made[model][1]


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A second tree of modules over the model's own tensors, with the attention that suits verification."""
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    use_grouped_attention(twin)
    return twin


def _unchanged(hidden: Tensor) -> Tensor:
    return hidden


_decoding_views = OncePerModel(twin)

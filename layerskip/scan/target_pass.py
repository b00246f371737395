"""One pass of the target over a text, which collects everything that the draft passes of a scan start from or attend to."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from layerskip.models.architecture import hidden_states
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
from layerskip.models.skip_view import decoding_view
from layerskip.scan.row_model import RowModel


class TargetPass(NamedTuple):
    """Results of the pass.

    Args:
        logits: ``[last, V]``.
        cache: all keys and values; its length is 0.
        visible: per layer which positions attend to which, ``[n, n]`` bool, or None for plain causal attention.
        layer_inputs: per layer the input hidden states at the last positions, ``[1, recorded, H]``; empty if none were
            requested.
    """

    logits: Tensor
    cache: KVCache
    visible: list[Tensor | None]
    layer_inputs: list[Tensor]


def run_target(rows: RowModel, tokens: Tensor, last: int, recorded: int = 0) -> TargetPass:
    """Run the target over a text.

    Args:
        rows: the target as a model of independent rows.
        tokens: ``[n]`` int64.
        last: number of final positions whose logits are returned.
        recorded: number of final positions whose layer inputs are returned.

    Raises:
        UnsupportedModel: an attention sub-layer takes no mask by name, or its mask differs between heads.
    """
    view = decoding_view(rows.model)
    blocks = view.get_submodule(rows.architecture.path)
    masks: dict[int, Tensor | None] = {}
    layer_inputs: list[Tensor] = []

    def record_input(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        layer_inputs.append(hidden_states(args, kwargs)[:, -recorded:].clone())  # a layer may overwrite its input

    def record_mask(index: int, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        if "attention_mask" not in kwargs:
            raise rows.unsupported(f"the attention of layer {index} takes no attention_mask")
        masks[index] = kwargs["attention_mask"]

    hooks = [
        blocks.get_submodule(f"{index}.{name}").register_forward_pre_hook(partial(record_mask, index), with_kwargs=True)
        for index, block in enumerate(rows.architecture.blocks)
        for name in block.attention
    ]
    for index in range(rows.layers if recorded else 0):
        hooks.append(blocks.get_submodule(str(index)).register_forward_pre_hook(record_input, with_kwargs=True))
    cache = KVCache(rows.layers, tokens.shape[0], device=tokens.device)
    try:
        logits = forward(view, tokens, cache, last=last)
    finally:
        for hook in hooks:
            hook.remove()
    converted: dict[int, Tensor | None] = {}  # by the identity of the model's mask, so that layers go on sharing masks
    visible = []
    for index in range(rows.layers):
        mask = masks[index]
        if id(mask) not in converted:
            converted[id(mask)] = None if mask is None else _visible(rows, mask, tokens.shape[0])
        visible.append(converted[id(mask)])
    return TargetPass(logits, cache, visible, layer_inputs)


def _visible(rows: RowModel, mask: Tensor, count: int) -> Tensor:
    """Return ``[n, n]`` bool from the model's own mask, which is bool or additive."""
    if mask.ndim != 4 or mask.shape[1] != 1:
        raise rows.unsupported(f"its attention mask has the shape {tuple(mask.shape)}")
    square = mask[0, 0, :, :count]
    return square.clone() if square.dtype == torch.bool else square > torch.finfo(square.dtype).min / 2

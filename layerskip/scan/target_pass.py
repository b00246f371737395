"""What is there to know of a text that the target reads once? All that rows of later passes may see, or begin with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from layerskip.models.architecture import hidden_states
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
from layerskip.models.skip_view import decoding_view
from layerskip.scan.row_model import RowModel


class Reading(NamedTuple):
    """What the target read.

    Args:
        logits: ``[last, V]``.
        cache: all keys and values; its length is 0.
        visible: per layer which positions see which, ``[n, n]`` bool, or None for plain causal attention.
        entering: per layer the hidden states that it was handed at the last positions, ``[1, entered, H]``; empty if none
            were asked for.
    """

    logits: Tensor
    cache: KVCache
    visible: list[Tensor | None]
    entering: list[Tensor]


def read(rows: RowModel, tokens: Tensor, last: int, entered: int = 0) -> Reading:
    """Let the target read a text.

    Args:
        rows: of the target.
        tokens: ``[n]`` int64.
        last: how many positions' logits to return.
        entered: at how many positions, the last ones, to note what every layer is handed.

    Raises:
        UnsupportedModel: an attention sub-layer takes no mask by name, or one that differs from head to head.
    """
    view = decoding_view(rows.model)
    blocks = view.get_submodule(rows.found.path)
    seen: dict[int, Tensor | None] = {}
    entering: list[Tensor] = []

    def enter(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        entering.append(hidden_states(args, kwargs)[:, -entered:].clone())  # a layer may write into what it is handed

    def note(index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            if "attention_mask" not in kwargs:
                raise rows.refusal(f"the attention of layer {index} takes no attention_mask")
            seen[index] = kwargs["attention_mask"]

        return hook

    hooks = [
        blocks.get_submodule(f"{index}.{name}").register_forward_pre_hook(note(index), with_kwargs=True)
        for index, block in enumerate(rows.found.blocks)
        for name in block.attention
    ]
    for index in range(rows.layers if entered else 0):
        hooks.append(blocks.get_submodule(str(index)).register_forward_pre_hook(enter, with_kwargs=True))
    cache = KVCache(rows.layers, tokens.shape[0], device=tokens.device)
    try:
        logits = forward(view, tokens, cache, last=last)
    finally:
        for hook in hooks:
            hook.remove()
    kept: dict[int, Tensor | None] = {}
    visible = []
    for index in range(rows.layers):
        mask = seen[index]
        if id(mask) not in kept:
            kept[id(mask)] = None if mask is None else _visible(rows, mask, tokens.shape[0])
        visible.append(kept[id(mask)])
    return Reading(logits, cache, visible, entering)


def _visible(rows: RowModel, mask: Tensor, count: int) -> Tensor:
    if mask.ndim != 4 or mask.shape[1] != 1:
        raise rows.refusal(f"its attention mask has the shape {tuple(mask.shape)}")
    seen = mask[0, 0, :, :count]
    return seen.clone() if seen.dtype == torch.bool else seen > torch.finfo(seen.dtype).min / 2

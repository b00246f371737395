"""Attention of a few queries to a long cache of grouped keys, without a copy of the keys for every head.

With grouped-query attention (arXiv 2305.13245), several heads share keys and values. Transformers repeats both for every
head in a verification, and uses torch's grouped heads for a single query, which are slow on a CPU. Here, the heads of a
group become further queries of their shared key head: the same kernel and the same sums, without the copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from layerskip.kernels.decode_attention import decode_attention, has_kernel

NAME = "layerskip_grouped"
PLAIN = "layerskip_plain"
"""Transformers' own attention, with a mask that is made without synchronising with the device."""

_MAX_QUERIES = 64  # with more, a call for each head of a group is cheap compared with the attention itself
_reads_buffers = ContextVar("_reads_buffers", default=False)
_biases: Any = WeakIdKeyDictionary()
_parts: Any = WeakIdKeyDictionary()


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Set this attention for a model that uses ``sdpa`` and supports other implementations."""
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation == "sdpa" and getattr(model, "_supports_attention_backend", False):
        model.config._attn_implementation = config._attn_implementation = NAME


@contextlib.contextmanager
def whole_buffers() -> Iterator[None]:
    """Use the kernel for few queries within the ``with`` block: passes over whole buffers need not read unused positions."""
    token = _reads_buffers.set(True)
    try:
        yield
    finally:
        _reads_buffers.reset(token)


def attend_in_parts(mask: Tensor, parts: Sequence[tuple[int, int]]) -> None:
    """Split attention under one mask into runs of rows, each over only the keys that its rows see. The sums are the same.

    ``mask`` is ``[1, 1, R, K]`` bool, the very tensor that attention gets; the split is kept as long as it is. ``parts`` are
    the first and the end row of each run, and cover all R rows.
    """
    _parts[mask] = [
        (first, end, _runs(keys), mask[:, :, first:end, keys])
        for first, end in parts
        for keys in [mask[0, 0, first:end].any(0).nonzero()[:, 0]]
    ]


def _runs(positions: Tensor) -> list[slice]:
    """Return rising positions as slices. There are few, and copying slices is faster than indexing positions."""
    breaks = (positions.diff() != 1).nonzero()[:, 0] + 1
    return [slice(int(run[0]), int(run[-1]) + 1) for run in positions.tensor_split(breaks) if len(run)]


def _select(states: Tensor, runs: Sequence[slice]) -> Tensor:
    """Return some runs of the m keys or values of ``[B, heads, m, d]``."""
    if len(runs) == 1:
        return states[:, :, runs[0]]
    return torch.cat([states[:, :, run] for run in runs], 2) if runs else states[:, :, :0]


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return attention ``[B, n, heads, d]`` of ``query [B, heads, n, d]`` to ``key``, ``value [B, key heads, m, d]``."""
    (batch, heads, count, width), groups, scale = query.shape, key.shape[1], kwargs.get("scaling")
    biased = kwargs.get("position_bias") is not None
    mask = None if attention_mask is None or attention_mask.shape[1] != 1 else attention_mask  # that all heads share
    if mask is not None and not biased and width == value.shape[-1] and _is_decoding(query, key, mask):
        return decode_attention(query, key, value, mask, width**-0.5 if scale is None else scale), None
    parts = None if attention_mask is None or torch.compiler.is_compiling() else _parts.get(attention_mask)
    if parts is not None:
        outputs = [
            attend(module, query[:, :, first:end], _select(key, runs), _select(value, runs), part, **kwargs)[0]
            for first, end, runs, part in parts
        ]
        return torch.cat(outputs, 1), None
    long = count > _MAX_QUERIES and heads > groups and query.device.type == "cpu" and not query.requires_grad
    if long and not biased and mask is not None:
        return _attend_by_member(query, key, value, mask, scale), None
    # A single query sees all keys and needs no mask; several without one are a prefill, causal from the first key on.
    few = (attention_mask is None and count == 1) or (mask is not None and count <= _MAX_QUERIES)
    if biased or not few or heads == groups:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    packed = query.reshape(batch, groups, heads // groups * count, width)
    bias = None if mask is None else _group_bias(mask, heads // groups, query.dtype)
    output = scaled_dot_product_attention(packed, key, value, attn_mask=bias, scale=scale)
    return output.reshape(batch, heads, count, value.shape[-1]).transpose(1, 2).contiguous(), None


def _is_decoding(query: Tensor, key: Tensor, mask: Tensor) -> bool:
    """Return whether a few queries attend to a cache on a device with a kernel for it."""
    compiling = torch.compiler.is_compiling()
    if not (compiling or (query.is_cuda and _reads_buffers.get())):
        return False
    fits = query.shape[0] == mask.shape[0] == 1 and query.shape[2] <= _MAX_QUERIES and key.shape[2] == mask.shape[3]
    return fits and not query.requires_grad and (compiling or has_kernel(query))


def _attend_by_member(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Return attention of a long block, ``[B, n, heads, d]``, by a call for each member of the groups. Nothing is copied."""
    (batch, heads, count, _), members = query.shape, query.shape[1] // key.shape[1]
    bias, output = _group_bias(mask, 1, query.dtype), query.new_empty(batch, count, heads, value.shape[-1])
    for member in range(members):
        part = scaled_dot_product_attention(query[:, member::members], key, value, attn_mask=bias, scale=scale)
        output[:, :, member::members] = part.transpose(1, 2)
    return output


def _local_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return transformers' mask; attention under one of a window leaves out the keys before the first query's window."""
    mask, size, start = _mask(*args, **kwargs), kwargs.get("local_size"), kwargs.get("q_offset")
    if mask is not None and size is not None and isinstance(start, int):
        # Transformers' own caches have dropped keys of earlier positions already.
        seen = slice(max(0, start + 1 - size - kwargs.get("kv_offset", 0)), None)
        if seen.start:
            _parts[mask] = [(0, mask.shape[2], [seen], mask[..., seen].contiguous())]
    return mask


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return transformers' mask, without its check for an empty cache, which would synchronise with the device."""
    if isinstance(kwargs.get("q_offset"), Tensor):
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


def _group_bias(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Return the bias ``[B, 1, heads * n, m]`` for all heads of a group, from a mask or bias ``[B, 1, n, m]``.

    Layers share their masks, so the bias is kept as long as the mask is; torch would convert the mask in every layer.
    """
    bias: Tensor | None = _biases.get(mask)
    if bias is None or bias.shape[2] != heads * mask.shape[2] or bias.dtype != dtype:
        bias = mask
        if mask.dtype == torch.bool:
            bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -float("inf"))
        bias = bias if heads == 1 else bias.repeat(1, 1, heads, 1)
        if bias is not mask:  # a value that is its own key would stay for ever
            _biases[mask] = bias
    return bias


AttentionInterface.register(NAME, attend)
AttentionInterface.register(PLAIN, sdpa_attention_forward)
AttentionMaskInterface.register(NAME, _local_mask)
AttentionMaskInterface.register(PLAIN, _mask)

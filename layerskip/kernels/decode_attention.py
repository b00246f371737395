"""Attention of few queries to a long cache on a GPU, split along the keys.

Flash-Decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html): the keys are divided among programs, and the
last one to end combines their partial sums by their maxima and totals. With grouped-query attention (arXiv 2305.13245), all
heads of a group are rows of one program, so keys are read once and never copied for each head. In a long cache, a tile of
keys that no query sees is not read, so the time follows the part in use, and the window of a sliding layer. Programs take
tiles in turns, so that the part in use is divided among all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from layerskip.device.trial import HAS_TRITON, faster_of_right, runs_kernels

_TILE = 64  # keys
_MAX_SPLITS = 64
_MAX_WIDTH = 256  # of a head; wider ones, and float32, do not fit the registers, and torch's operators compute them
_DENSE = 1024  # keys; of fewer, tiles that no query sees are read too, as finding them out takes longer
_MIN_COUNTERS = 4096
_own_counters: ContextVar[dict[Hashable, Tensor] | None] = ContextVar("_own_counters", default=None)
_of_streams: dict[Hashable, Tensor] = {}

if HAS_TRITON:
    import triton
    import triton.language as tl

    # Other lengths of the cache need no compilation, which would take a second in the middle of decoding.
    @triton.jit(do_not_specialize=["splits", "turns"])  # type: ignore[untyped-decorator]
    def _attend_split(  # type: ignore[no-untyped-def]
        query, key, value, mask, result_to, sums, maxima, totals, counters,
        scale, count, group, keys, row_blocks, splits, turns,
        query_head, query_row, key_head, key_row, value_head, value_row, mask_row,
        BOOL: tl.constexpr, SPARSE: tl.constexpr, WIDTH: tl.constexpr,
        ROWS: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr,
    ):  # fmt: skip
        shared, split = tl.program_id(0) // row_blocks, tl.program_id(1)
        rows = (tl.program_id(0) % row_blocks) * ROWS + tl.arange(0, ROWS)
        dims = tl.arange(0, DIMS)
        is_row, is_dim = rows < group * count, dims < WIDTH
        head, token = shared * group + rows // count, rows % count
        query_at = query + head[:, None] * query_head + token[:, None] * query_row + dims[None]
        queries = tl.load(query_at, mask=is_row[:, None] & is_dim[None], other=0.0)
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        output = tl.zeros((ROWS, DIMS), tl.float32)
        for turn in range(turns):
            columns = (turn * splits + split) * KEYS + tl.arange(0, KEYS)
            is_pair = is_row[:, None] & (columns < keys)[None]
            at = mask + token[:, None] * mask_row + columns[None]
            if BOOL:
                bias = tl.where(tl.load(at, mask=is_pair, other=0) != 0, 0.0, float("-inf"))
            else:
                bias = tl.load(at, mask=is_pair, other=float("-inf")).to(tl.float32)
            is_seen = True
            if SPARSE:
                is_seen = tl.max(tl.max(bias, 1), 0) > float("-inf")
            if is_seen:
                is_key = (columns < keys)[:, None] & is_dim[None]
                key_at = key + shared * key_head + columns[:, None] * key_row + dims[None]
                key_tile = tl.load(key_at, mask=is_key, other=0.0)
                value_at = value + shared * value_head + columns[:, None] * value_row + dims[None]
                value_tile = tl.load(value_at, mask=is_key, other=0.0)  # before the product, which would wait for it
                scores = tl.dot(queries, tl.trans(key_tile), input_precision="ieee") * scale + bias
                peak = tl.maximum(highest, tl.max(scores, 1))
                finite = tl.where(peak == float("-inf"), 0.0, peak)
                shares, decay = tl.exp(scores - finite[:, None]), tl.exp(highest - finite)
                output = output * decay[:, None] + tl.dot(shares.to(value_tile.dtype), value_tile, input_precision="ieee")
                total = total * decay + tl.sum(shares, 1)
                highest = peak
        heads = (tl.num_programs(0) // row_blocks) * group
        cells = head * count + token
        tl.store(maxima + split * heads * count + cells, highest, mask=is_row)
        tl.store(totals + split * heads * count + cells, total, mask=is_row)
        written = (is_row & (highest > float("-inf")))[:, None] & is_dim[None]  # the others are never read
        tl.store(sums + (split * heads * count + cells)[:, None] * WIDTH + dims[None], output, mask=written)
        # The program that ends last combines the parts. The counter is 0 again after it.
        tl.debug_barrier()
        if tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel") == splits - 1:
            tl.store(counters + tl.program_id(0), 0)
            highest = tl.full((ROWS,), float("-inf"), tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            output = tl.zeros((ROWS, DIMS), tl.float32)
            for part in range(splits):
                at = part * heads * count + cells
                peak = tl.load(maxima + at, mask=is_row, other=float("-inf"), cache_modifier=".cg")
                top = tl.maximum(highest, peak)
                finite = tl.where(top == float("-inf"), 0.0, top)
                weight, decay = tl.exp(peak - finite), tl.exp(highest - finite)
                read = (weight > 0)[:, None] & is_dim[None]
                total = total * decay + weight * tl.load(totals + at, mask=is_row, other=0.0, cache_modifier=".cg")
                rows_of_part = tl.load(sums + at[:, None] * WIDTH + dims[None], mask=read, other=0.0, cache_modifier=".cg")
                output = output * decay[:, None] + weight[:, None] * rows_of_part
                highest = top
            result = (output / total[:, None]).to(result_to.dtype.element_ty)
            result_at = result_to + (token * heads + head)[:, None] * WIDTH + dims[None]
            tl.store(result_at, result, mask=is_row[:, None] & is_dim[None])


def attend_on_gpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Run the kernel; see :func:`decode_attention`."""
    (_, heads, count, width), shared, keys = query.shape, key.shape[1], key.shape[2]
    group = heads // shared
    rows = min(64, max(16, triton.next_power_of_2(group * count)))
    row_blocks = triton.cdiv(group * count, rows)
    tiles, dims = triton.cdiv(keys, _TILE), max(16, triton.next_power_of_2(width))
    splits = min(tiles, _MAX_SPLITS)
    maxima, totals = torch.empty((2, splits, heads, count), dtype=torch.float32, device=query.device)
    sums = torch.empty((splits, heads, count, width), dtype=torch.float32, device=query.device)
    output = torch.empty((1, count, heads, width), dtype=query.dtype, device=query.device)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        _attend_split[(shared * row_blocks, splits)](
            query, key, value, mask, output, sums, maxima, totals, _counters(query.device, shared * row_blocks),
            scale, count, group, keys, row_blocks, splits, triton.cdiv(tiles, splits),
            *query.stride()[1:3], *key.stride()[1:3], *value.stride()[1:3], mask.stride(2),
            BOOL=mask.dtype == torch.bool, SPARSE=keys > _DENSE, WIDTH=width, ROWS=rows,
            KEYS=_TILE, DIMS=dims, num_warps=4 if dims < _MAX_WIDTH else 8, num_stages=1,
        )  # fmt: skip
    return output


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Compute what the kernel does with torch's operators: the heads of a group are further queries of their shared key."""
    (_, heads, count, width), groups = query.shape, key.shape[1]
    packed = query.reshape(1, groups, heads // groups * count, width)
    rows = mask if heads == groups else mask.repeat(1, 1, heads // groups, 1)
    output = scaled_dot_product_attention(packed, key, value, attn_mask=rows, scale=scale)
    return output.reshape(1, heads, count, value.shape[3]).transpose(1, 2).contiguous()


@torch.library.custom_op("layerskip::decode_attention", mutates_args=())
def decode_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Compute attention under a mask that all heads share. Where they are faster, torch's operators do it.

    Args:
        query: ``[1, heads, n, d]``.
        key, value: ``[1, key heads, m, d]``.
        mask: ``[1, 1, n, m]``: bool, True where a query sees a key; or a bias in a floating dtype.
        scale: the factor of the scores.

    Returns:
        ``[1, n, heads, d]`` in the dtype of ``query``.
    """
    given = query, key, value, mask, scale
    if not has_kernel(query):
        return attend_plainly(*given)

    def draw() -> tuple[Any, ...]:
        source = torch.Generator(query.device).manual_seed(0)
        parts = (torch.randn(part.shape, generator=source, device=part.device).to(part.dtype) for part in given[:3])
        return *parts, _mask_of_trial(mask), scale

    kind = query.device, query.dtype, tuple(query.shape), tuple(key.shape), mask.dtype
    return faster_of_right("attention of few queries", kind, attend_on_gpu, attend_plainly, draw)(*given)


def _mask_of_trial(mask: Tensor) -> Tensor:
    """Return a mask like ``mask`` under which query i sees the first half of the keys and i more."""
    count, keys = mask.shape[2:]
    rows, columns = torch.arange(count, device=mask.device)[:, None], torch.arange(keys, device=mask.device)
    seen = (columns <= keys // 2 + rows)[None, None]
    return seen if mask.dtype == torch.bool else torch.zeros_like(mask).masked_fill(~seen, -float("inf"))


@decode_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


@contextlib.contextmanager
def own_counters() -> Iterator[None]:
    """Give kernels within the ``with`` block counters of their own: another graph may run on another stream meanwhile."""
    token = _own_counters.set({})
    try:
        yield
    finally:
        _own_counters.reset(token)


def _counters(device: torch.device, count: int) -> Tensor:
    """Return at least ``count`` counters of finished programs, all 0 between calls: those of the graph or of the stream."""
    found = _own_counters.get()
    key: Hashable = device
    if found is None:
        found, key = _of_streams, (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    if key not in found or found[key].numel() < count:
        found[key] = torch.zeros(max(count, _MIN_COUNTERS), dtype=torch.int32, device=device)
    return found[key]


def has_kernel(query: Tensor) -> bool:
    """Return whether there is a kernel for queries like these, ``[1, heads, n, d]``."""
    is_small = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= _MAX_WIDTH
    return is_small and runs_kernels(query)

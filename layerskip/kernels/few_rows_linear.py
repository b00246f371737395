"""Products of few rows with a weight matrix on a GPU, in half precision, with what surrounds them in a decoder layer.

Reading the weights takes most of the time, and libraries choose tiles for more rows. Every program here reads some rows of
the weight once, in order. A row's result does not depend on the other rows.

The rows may be normalised first (RMSNorm, arXiv 1910.07467), and a residual or the gate of an MLP (arXiv 2002.05202) may
follow, in the same kernel. Results are rounded where torch's operators round them, one after the other.
:mod:`layerskip.kernels.product_fusion` finds these operators in compiled layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from layerskip.device.trial import HAS_TRITON, faster_of_right, runs_kernels

MAX_ROWS = 32  # a draft of 16 tokens is verified in 24
_LARGE = 4096  # outputs; from here on each program computes more of them


def normalise(hidden: Tensor, epsilon: float) -> Tensor:
    """Divide rows ``[..., in]`` by the root of their mean square, in float32."""
    wide = hidden.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)


NORMS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "llama": lambda hidden, scale, epsilon: scale * normalise(hidden, epsilon).to(hidden.dtype),
    "gemma": lambda hidden, scale, epsilon: (normalise(hidden, epsilon) * (1.0 + scale.float())).to(hidden.dtype),
}
"""The norms of the kernel by name; the families differ in where they round, and in what the weight is added to."""

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu_tanh": functools.partial(gelu, approximate="tanh")}
"""The activations of gates by name."""

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def _multiply(  # type: ignore[no-untyped-def]
        hidden, weight, residual, scale, output, rows, outputs, epsilon, WIDTH: tl.constexpr,
        ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
        RESIDUAL: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr,
    ):  # fmt: skip
        row, column = tl.arange(0, ROWS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        dtype = output.dtype.element_ty
        if NORM != "":
            squares = tl.zeros((ROWS, STEP), tl.float32)
            for start in tl.range(0, WIDTH, STEP, num_stages=4):  # else each load waits for the one before
                step = start + tl.arange(0, STEP)
                is_hidden = (row < rows)[:, None] & (step < WIDTH)[None]
                part = tl.load(hidden + row[:, None] * WIDTH + step[None], mask=is_hidden, other=0.0).to(tl.float32)
                squares += part * part
            factor = tl.rsqrt(tl.sum(squares, 1) / WIDTH + epsilon)[:, None]
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        second = tl.zeros((ROWS, OUTPUTS), tl.float32)  # of what the gate is multiplied with
        for start in range(0, WIDTH, STEP):
            step = start + tl.arange(0, STEP)
            is_hidden = (row < rows)[:, None] & (step < WIDTH)[None]
            is_weight = (column < outputs)[:, None] & (step < WIDTH)[None]
            part = tl.load(hidden + row[:, None] * WIDTH + step[None], mask=is_hidden, other=0.0)
            if NORM != "":
                normed = part.to(tl.float32) * factor
                factors = tl.load(scale + step, mask=step < WIDTH, other=0.0).to(tl.float32)[None]
                if NORM == "gemma":
                    normed *= 1.0 + factors
                else:
                    normed = normed.to(dtype).to(tl.float32) * factors
                part = normed.to(dtype)
            tile_at = weight + column.to(tl.int64)[:, None] * WIDTH + step[None]
            total = tl.dot(part, tl.trans(tl.load(tile_at, mask=is_weight, other=0.0)), total)
            if GATE != "":
                tile_at += outputs.to(tl.int64) * WIDTH
                second = tl.dot(part, tl.trans(tl.load(tile_at, mask=is_weight, other=0.0)), second)
        is_output = (row < rows)[:, None] & (column < outputs)[None]
        at = row[:, None] * outputs + column[None]
        if GATE != "":
            gate = total.to(dtype).to(tl.float32)
            if GATE == "silu":
                gate = gate / (1.0 + tl.exp(-gate))
            else:
                inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
                gate = 0.5 * gate * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))
            total = gate.to(dtype).to(tl.float32) * second.to(dtype).to(tl.float32)
        if RESIDUAL:
            total = total.to(dtype).to(tl.float32) + tl.load(residual + at, mask=is_output, other=0.0).to(tl.float32)
        tl.store(output + at, total.to(dtype), mask=is_output)


def multiply_on_gpu(
    hidden: Tensor, weight: Tensor, residual: Tensor | None, gate: str, norm: str, scale: Tensor | None, epsilon: float
) -> Tensor:
    """Run the kernel; see :func:`few_rows_linear`."""
    outputs, width = weight.shape[0] // (2 if gate else 1), weight.shape[1]
    result = hidden.new_empty(*hidden.shape[:-1], outputs)
    tile = 32 if outputs >= _LARGE and not gate else 16  # with a gate, a program reads twice as many rows of the weight
    rows = hidden.numel() // width
    with torch.cuda.device_of(hidden):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        _multiply[(triton.cdiv(outputs, tile),)](
            hidden, weight, hidden if residual is None else residual, weight if scale is None else scale, result,
            rows, outputs, epsilon, WIDTH=width, ROWS=16 if rows <= 16 else 32, OUTPUTS=tile, STEP=128,
            RESIDUAL=residual is not None, GATE=gate, NORM=norm, num_warps=2, num_stages=5,
        )  # fmt: skip
    return result


def multiply_plainly(
    hidden: Tensor, weight: Tensor, residual: Tensor | None, gate: str, norm: str, scale: Tensor | None, epsilon: float
) -> Tensor:
    """Compute what the kernel does with torch's operators."""
    output = linear(hidden if scale is None else NORMS[norm](hidden, scale, epsilon), weight)
    if gate:
        gated, factor = output.chunk(2, -1)
        return GATES[gate](gated) * factor
    return output if residual is None else residual + output


@torch.library.custom_op("layerskip::few_rows_linear", mutates_args=())
def few_rows_linear(
    hidden: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    gate: str = "",
    norm: str = "",
    scale: Tensor | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """Multiply at most 32 rows by a weight. Where they are faster, torch's operators do it.

    Args:
        hidden: ``[..., in]``, contiguous, float16 or bfloat16.
        weight: ``[out, in]``, contiguous, of the same dtype.
        residual: ``[..., out]``, contiguous: added to the product.
        gate: a name of ``GATES``, whose value for the first half of the outputs multiplies the second half; or empty.
        norm: a name of ``NORMS``, the norm of the rows before the product; or empty.
        scale, epsilon: of the norm; the first is its weight, ``[in]``, contiguous.

    Returns:
        ``[..., out]``, with a gate ``[..., out / 2]``.
    """
    given = hidden, weight, residual, gate, norm, scale, epsilon
    if not has_kernel(weight):
        return multiply_plainly(*given)

    def draw() -> list[Any]:
        source = torch.Generator(hidden.device).manual_seed(0)
        return [
            torch.randn(part.shape, generator=source, device=part.device).to(part.dtype)
            if isinstance(part, Tensor) and part is not weight
            else part
            for part in given
        ]

    kind = hidden.device, hidden.dtype, tuple(hidden.shape), tuple(weight.shape), residual is not None, gate, norm
    return faster_of_right("products of few rows", kind, multiply_on_gpu, multiply_plainly, draw)(*given)


@few_rows_linear.register_fake
def _(hidden: Tensor, weight: Tensor, residual: Tensor | None = None, gate: str = "", *_: Any) -> Tensor:
    return hidden.new_empty(*hidden.shape[:-1], weight.shape[0] // (2 if gate else 1))


def has_kernel(weight: Tensor) -> bool:
    """Return whether there is a kernel for weights like this."""
    return weight.dtype in (torch.float16, torch.bfloat16) and runs_kernels(weight)

"""Products of few rows with a weight matrix on a GPU, in half precision.

Verification multiplies 2 to 16 rows with every weight. Reading the weights takes most of the time, and libraries choose
tiles for more rows. Every program here reads some rows of the weight once, in order. A row's result does not depend on the
other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from layerskip.kernels.kernel_trial import HAS_TRITON, passes_trial, waiting_allowed

MAX_ROWS = 16
_LARGE = 4096  # outputs; from here on each program computes more of them

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def _multiply(  # type: ignore[no-untyped-def]
        hidden, weight, output, rows, outputs, WIDTH: tl.constexpr,
        ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
    ):  # fmt: skip
        row, column = tl.arange(0, ROWS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for start in range(0, WIDTH, STEP):
            step = start + tl.arange(0, STEP)
            is_hidden = (row < rows)[:, None] & (step < WIDTH)[None]
            is_weight = (column < outputs)[:, None] & (step < WIDTH)[None]
            part = tl.load(hidden + row[:, None] * WIDTH + step[None], mask=is_hidden, other=0.0)
            tile = tl.load(weight + column.to(tl.int64)[:, None] * WIDTH + step[None], mask=is_weight, other=0.0)
            total = tl.dot(part, tl.trans(tile), total)
        is_output = (row < rows)[:, None] & (column < outputs)[None]
        tl.store(output + row[:, None] * outputs + column[None], total.to(output.dtype.element_ty), mask=is_output)


@torch.library.custom_op("layerskip::few_rows_linear", mutates_args=(), device_types="cuda")
def few_rows_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """Multiply at most 16 rows by a weight.

    Args:
        hidden: ``[..., in]``, contiguous, float16 or bfloat16.
        weight: ``[out, in]``, contiguous, of the same dtype.

    Returns:
        ``[..., out]``.
    """
    outputs, width = weight.shape
    result = hidden.new_empty(*hidden.shape[:-1], outputs)
    tile = 32 if outputs >= _LARGE else 16
    _multiply[(triton.cdiv(outputs, tile),)](
        hidden, weight, result, hidden.numel() // width, outputs, WIDTH=width,
        ROWS=16, OUTPUTS=tile, STEP=128, num_warps=2, num_stages=5,
    )  # fmt: skip
    return result


@few_rows_linear.register_fake
def _(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.new_empty(*hidden.shape[:-1], weight.shape[0])


def has_kernel(weight: Tensor) -> bool:
    """Return whether the kernel works for a weight like this ``[out, in]``."""
    if not weight.is_cuda or weight.dtype not in (torch.float16, torch.bfloat16) or not HAS_TRITON:
        return False

    def run() -> tuple[Tensor, Tensor]:
        source = torch.Generator(weight.device).manual_seed(0)
        hidden = torch.randn(5, weight.shape[1], generator=source, device=weight.device).to(weight.dtype)
        return few_rows_linear(hidden, weight), linear(hidden, weight)

    with waiting_allowed():
        return passes_trial("products of few rows", (weight.device, weight.dtype, tuple(weight.shape)), run)

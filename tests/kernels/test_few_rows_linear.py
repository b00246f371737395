"""Products of few rows give the results of torch's operators, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from layerskip.kernels.few_rows_linear import few_rows_linear, multiply_on_gpu
from tests.kernels.gpu_or_interpreter import HALF, drawn, needs_triton


def _norm(hidden: Tensor, scale: Tensor, kind: str) -> Tensor:
    """Return the norm of rows in float64, rounded once; torch's own RMSNorm has the weight of Llama's."""
    weight = scale.double() + (kind == "gemma")
    return torch.nn.functional.rms_norm(hidden.double(), hidden.shape[-1:], weight, 1e-5)


@needs_triton
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 100, 96), (16, 4200, 200), (5, 64, 576)])
@pytest.mark.parametrize("norm", ["", "llama", "gemma"])
@pytest.mark.parametrize("after", ["", "residual", "silu", "gelu_tanh"])
def test_products_of_few_rows_equal_torchs(
    rows: int, outputs: int, width: int, norm: str, after: str, dtype: torch.dtype
) -> None:
    """Also with a norm before and a residual or a gate after them."""
    hidden, weight = 3 * drawn(1, rows, width).to(dtype), drawn(outputs, width).to(dtype) / width**0.5
    scale = drawn(width).to(dtype) if norm else None
    residual, gate = drawn(1, rows, outputs).to(dtype) if after == "residual" else None, after.replace("residual", "")
    normed = hidden.double() if scale is None else _norm(hidden, scale, norm)
    expected = linear(normed, weight.double())
    if gate:
        opened, factor = expected.chunk(2, -1)
        activation = torch.nn.functional.silu if gate == "silu" else partial(torch.nn.functional.gelu, approximate="tanh")
        expected = activation(opened) * factor
    expected = expected if residual is None else expected + residual.double()
    actual = multiply_on_gpu(hidden, weight, residual, gate, norm, scale, 1e-5)
    close = partial(torch.testing.assert_close, rtol=2e-2, atol=(2e-2 if dtype == torch.float16 else 0.1))
    close(actual.double(), expected)
    cpu = [part if part is None else part.cpu() for part in (hidden, weight, residual, scale)]
    stand_in = few_rows_linear(*cpu[:3], gate, norm, cpu[3], 1e-5)
    close(stand_in.double(), expected.cpu())

"""GPU kernels give the results of torch's operators, on a GPU or in Triton's interpreter (``TRITON_INTERPRET=1``) on a CPU.

A kernel that fails its trial is replaced by these operators, with one line in the log.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from layerskip.device.trial import HAS_TRITON, passes_trial
from layerskip.kernels import decode_attention as attention
from layerskip.kernels import few_rows_linear as few_rows
from layerskip.kernels.decode_attention import _counters, attend_on_gpu, decode_attention, own_counters
from layerskip.kernels.few_rows_linear import few_rows_linear, multiply_on_gpu
from tests.accelerator import DEVICE
from tests.exhaustive import representative

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET")) and DEVICE == "cpu"
# The interpreter multiplies bfloat16 wrongly. On a GPU every kind of input is compiled, which takes seconds.
HALF = (torch.float16,) if INTERPRETED else representative((torch.bfloat16,), (torch.float16,))
needs_triton = pytest.mark.skipif(not HAS_TRITON or (DEVICE == "cpu" and not INTERPRETED), reason="needs Triton and a GPU")


def drawn(*shape: int) -> Tensor:
    """Returns normal values that are the same for every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@needs_triton
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize(
    "shape",  # heads, heads of keys, queries, width, keys, keys in use
    [
        (9, 3, 1, 64, 512, 37),  # one tile in use
        (9, 3, 5, 64, 512, 200),
        (8, 1, 8, 96, 300, 300),  # neither the keys nor the width are a multiple of a tile
        (4, 4, 16, 32, 2048, 900),  # long enough that tiles are left out
        (32, 8, 9, 128, 700, 650),  # rows of several programs
    ],
)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_to_a_cache_equals_torchs(
    shape: tuple[int, ...], window: int | None, biased: bool, dtype: torch.dtype
) -> None:
    """Also if only some keys are seen, and twice in a row, as the kernel must leave its counters at 0."""
    heads, shared, count, width, keys, used = shape
    query = drawn(1, count, heads, width).to(dtype).transpose(1, 2)
    key, value = drawn(1, shared, keys, width).to(dtype), drawn(1, shared, keys, width).to(dtype) + 1
    last = torch.arange(used - count, used, device=DEVICE)[:, None]
    place = torch.arange(keys, device=DEVICE)[None]
    mask = (place <= last) & (place > last - (window or keys))
    repeated = (part.float().repeat_interleave(heads // shared, 1) for part in (key, value))
    expected = scaled_dot_product_attention(query.float(), *repeated, mask).transpose(1, 2)  # type: ignore[misc]
    given = torch.zeros(mask.shape, dtype=dtype, device=DEVICE).masked_fill(~mask, -torch.inf) if biased else mask
    for _ in range(2):
        actual = attend_on_gpu(query, key, value, given[None, None], width**-0.5)
        torch.testing.assert_close(actual.float(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_attention_has_a_stand_in_on_a_cpu() -> None:
    """Compiled layers call it there."""
    query, key, value = (torch.randn(1, heads, count, 8) for heads, count in ((4, 3), (2, 9), (2, 9)))
    mask = torch.ones(1, 1, 3, 9, dtype=torch.bool).tril(6)
    expected = scaled_dot_product_attention(query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), mask)
    torch.testing.assert_close(decode_attention(query, key, value, mask, 8**-0.5), expected.transpose(1, 2))


def test_graphs_and_streams_have_counters_of_their_own() -> None:
    """Else two that run at the same time would count each other's programs."""
    device, found = torch.device(DEVICE), []
    for _ in range(2):
        with own_counters():
            found.append(_counters(device, 8))
            assert _counters(device, 8) is found[-1]  # those of all layers of a graph
    found.append(_counters(device, 8))
    assert _counters(device, 8) is found[-1]
    if DEVICE == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            found.append(_counters(device, 8))
    assert len({counters.data_ptr() for counters in found}) == len(found)


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


def _fail(*_: object) -> Tensor:
    raise ValueError("no\nsuch")


def test_torchs_operators_replace_a_kernel_that_fails_its_trial(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For this kind of input alone; the trial draws its own inputs of the same shapes, once."""
    monkeypatch.setattr(few_rows, "multiply_on_gpu", lambda hidden, weight, *_: hidden.new_zeros(1, 2, weight.shape[0]))
    monkeypatch.setattr(attention, "attend_on_gpu", _fail)
    hidden, weight, residual = torch.randn(1, 2, 7), torch.randn(5, 7), torch.randn(1, 2, 5)
    states, mask = [torch.randn(1, 2, count, 8) for count in (3, 9, 9)], torch.zeros(1, 1, 3, 9)
    for _ in range(2):
        product = few_rows_linear._backend_fns["cuda"](hidden, weight, residual)
        torch.testing.assert_close(product, residual + linear(hidden, weight))
        attended = decode_attention._backend_fns["cuda"](*states, mask, 0.5)
        torch.testing.assert_close(attended, scaled_dot_product_attention(*states, mask, scale=0.5).transpose(1, 2))
    reasons = [record.message.split(" cannot")[0] + record.message.rpartition(":")[2] for record in caplog.records]
    assert reasons == [
        "the kernel for products of few rows it gives other results",
        "the kernel for attention of few queries no",
    ]
    assert passes_trial("products", "right", lambda: (torch.ones(2), torch.ones(2)))

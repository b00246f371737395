"""GPU kernels give the results of torch's operators, on a GPU or, with ``TRITON_INTERPRET=1``, where Triton is installed."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from layerskip.kernels.decode_attention import decode_attention
from layerskip.kernels.few_rows_linear import few_rows_linear
from layerskip.kernels.kernel_trial import HAS_TRITON, passes_trial
from tests.accelerator import DEVICE

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET")) and DEVICE == "cpu"
DTYPES = (torch.float16, torch.float32) if INTERPRETED else (torch.bfloat16, torch.float16, torch.float32)
needs_triton = pytest.mark.skipif(not HAS_TRITON or (DEVICE == "cpu" and not INTERPRETED), reason="needs Triton and a GPU")


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "shared", "count", "width", "keys", "used"),
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
    heads: int,
    shared: int,
    count: int,
    width: int,
    keys: int,
    used: int,
    window: int | None,
    biased: bool,
    dtype: torch.dtype,
) -> None:
    """Also if only some keys are seen, and twice in a row, as the kernel must leave its counters at 0."""
    query = _random(1, count, heads, width).to(dtype).transpose(1, 2)
    key, value = _random(1, shared, keys, width).to(dtype), _random(1, shared, keys, width).to(dtype) + 1
    last = torch.arange(used - count, used, device=DEVICE)[:, None]
    place = torch.arange(keys, device=DEVICE)[None]
    mask = (place <= last) & (place > last - (window or keys))
    repeated = (part.float().repeat_interleave(heads // shared, 1) for part in (key, value))
    expected = scaled_dot_product_attention(query.float(), *repeated, mask).transpose(1, 2)  # type: ignore[misc]
    given = torch.zeros(mask.shape, dtype=dtype, device=DEVICE).masked_fill(~mask, -torch.inf) if biased else mask
    kernel = decode_attention._backend_fns["cuda"] if INTERPRETED else decode_attention
    for _ in range(2):
        actual = kernel(query, key, value, given[None, None], width**-0.5)
        torch.testing.assert_close(actual.float(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)


@needs_triton
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32])
@pytest.mark.parametrize(("rows", "outputs", "width"), [(2, 100, 96), (16, 4200, 200), (5, 64, 576)])
def test_products_of_few_rows_equal_torchs(rows: int, outputs: int, width: int, dtype: torch.dtype) -> None:
    hidden, weight = _random(1, rows, width).to(dtype), _random(outputs, width).to(dtype)
    kernel = few_rows_linear._backend_fns["cuda"] if INTERPRETED else few_rows_linear
    expected = linear(hidden.float(), weight.float())
    torch.testing.assert_close(kernel(hidden, weight).float(), expected, rtol=2e-2, atol=0.1)


def test_attention_has_a_stand_in_on_a_cpu() -> None:
    """Compiled layers call it there."""
    query, key, value = (torch.randn(1, heads, count, 8) for heads, count in ((4, 3), (2, 9), (2, 9)))
    mask = torch.ones(1, 1, 3, 9, dtype=torch.bool).tril(6)
    expected = scaled_dot_product_attention(query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), mask)
    torch.testing.assert_close(decode_attention(query, key, value, mask, 8**-0.5), expected.transpose(1, 2))


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda: (torch.ones(2), torch.zeros(2)), "it gives other results"),
        (lambda: (_ for _ in ()).throw(ValueError("no\nsuch")), "no"),
    ],
)
def test_a_kernel_that_fails_its_trial_is_not_used(run: object, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is tried once, and one line is logged."""
    for _ in range(2):
        assert not passes_trial("products", reason, run)  # type: ignore[arg-type]
    assert [record.message for record in caplog.records] == [f"the kernel for products cannot be used ({reason}): {reason}"]
    assert passes_trial("products", "right", lambda: (torch.ones(2), torch.ones(2)))

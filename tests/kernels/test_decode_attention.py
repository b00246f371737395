"""Attention to a cache gives the results of torch's operator, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from layerskip.kernels.decode_attention import _counters, attend_on_gpu, decode_attention, own_counters
from tests.accelerator import DEVICE
from tests.kernels.gpu_or_interpreter import HALF, drawn, needs_triton


@needs_triton
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
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

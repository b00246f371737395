"""GPU kernels give the results of torch's operators, on a GPU or, without one, in Triton's interpreter.

A kernel that fails its trial is replaced by these operators, with one line in the log.
"""

from __future__ import annotations

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from layerskip.device.trial import HAS_TRITON, Compute, faster_of_right
from layerskip.kernels import decode_attention as attention
from layerskip.kernels import few_rows_linear as few_rows
from layerskip.kernels.decode_attention import _counters, attend_on_gpu, decode_attention, own_counters
from layerskip.kernels.few_rows_linear import few_rows_linear, multiply_on_gpu
from tests.accelerator import DEVICE
from tests.exhaustive import representative

# The interpreter multiplies bfloat16 wrongly. On a GPU every kind of input is compiled, which takes seconds.
HALF = (torch.float16,) if DEVICE == "cpu" else representative((torch.bfloat16,), (torch.float16,))
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def drawn(*shape: int) -> Tensor:
    """Returns normal values that are the same for every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@needs_triton
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "sizes",  # heads, heads of keys, queries, width of a head, keys, those in use
    representative(
        [
            (4, 2, 1, 32, 200, 37),  # one tile in use
            (4, 1, 3, 96, 300, 300),  # neither the keys nor the width are a multiple of a tile
            (2, 1, 3, 16, 1100, 700),  # long enough that tiles are left out, and programs take several
            (16, 2, 9, 32, 130, 120),  # rows of several programs
        ],
        [(9, 3, 5, 64, 512, 200), (4, 4, 16, 32, 2048, 900), (32, 8, 9, 128, 700, 650)],
    ),
)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_to_a_cache_equals_torchs(
    sizes: tuple[int, ...], window: int | None, biased: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if only some keys are seen, and twice in a row, as the kernel must leave its counters at 0."""
    monkeypatch.setattr(attention, "_MAX_SPLITS", 5)
    heads, shared, count, width, keys, used = sizes
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
        torch.testing.assert_close(actual.float(), expected, rtol=0, atol=2e-2)


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
@pytest.mark.parametrize(
    ("rows", "outputs", "width"), representative([(1, 100, 96), (20, 36, 200)], [(16, 4200, 200), (5, 64, 576)])
)
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


def test_torchs_operators_replace_a_kernel_that_fails_its_trial(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For this kind of input alone; the trial draws its own inputs of the same shapes."""
    monkeypatch.setattr(few_rows, "multiply_on_gpu", lambda hidden, weight, *_: hidden.new_zeros(1, 2, weight.shape[0]))
    monkeypatch.setattr(attention, "attend_on_gpu", lambda query, *_: query.new_zeros(query.transpose(1, 2).shape))
    for module in (few_rows, attention):
        monkeypatch.setattr(module, "has_kernel", lambda _: True)
    hidden, weight, residual = torch.randn(1, 2, 7), torch.randn(5, 7), torch.randn(1, 2, 5)
    product = few_rows_linear(hidden, weight, residual)
    torch.testing.assert_close(product, residual + linear(hidden, weight))
    states = [torch.randn(1, heads, count, 8) for heads, count in ((4, 3), (2, 9), (2, 9))]
    mask, repeated = torch.full((1, 1, 3, 9), -torch.inf).triu(7), [part.repeat_interleave(2, 1) for part in states[1:]]
    expected = scaled_dot_product_attention(states[0], *repeated, mask, scale=0.5).transpose(1, 2)
    torch.testing.assert_close(decode_attention(*states, mask, 0.5), expected)
    assert [record.message.split(" cannot")[0] for record in caplog.records] == [
        f"the kernel for {name}" for name in ("products of few rows", "attention of few queries")
    ]


def _fails(*_: object) -> Tensor:
    raise ValueError("no\nsuch")


@pytest.mark.parametrize(("kernel", "reason"), [(torch.zeros_like, "it gives other results"), (_fails, "no")])
def test_a_kernel_that_fails_its_trial_is_not_used(kernel: Compute, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is tried once, and one line is logged."""

    def draw() -> list[Tensor]:
        return [torch.ones(2)]

    for _ in range(2):
        assert faster_of_right("products", reason, kernel, torch.ones_like, draw) is torch.ones_like
    assert [record.message for record in caplog.records] == [f"the kernel for products cannot be used ({reason}): {reason}"]
    assert faster_of_right("products", "right", torch.clone, torch.ones_like, draw) is torch.clone


def test_too_little_memory_says_nothing_about_a_kernel() -> None:
    draw, scarce = lambda: [torch.ones(2)], Mock(side_effect=torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        faster_of_right("ones", "scarce", scarce, torch.ones_like, draw)
    assert faster_of_right("ones", "scarce", torch.clone, torch.ones_like, draw) is torch.clone


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_kernel_that_takes_longer_is_not_used() -> None:
    def slow(given: Tensor) -> Tensor:
        return (given @ torch.eye(len(given), device=given.device, dtype=given.dtype)).clone()

    given = torch.ones(2048, 2048, device=DEVICE)
    assert faster_of_right("copies", "slow", slow, torch.clone, lambda: [given]) is torch.clone
    assert faster_of_right("copies", "fast", torch.clone, slow, lambda: [given]) is torch.clone

"""Tests that a budget bounds the memory of fitting bridges, for every kind of bridge, family and dtype."""

from __future__ import annotations

import pytest
import torch

from layerskip.bridges.fit import Calibration
from layerskip.models.target import Target
from layerskip.scan.text_batch import TextCache
from tests.accelerator import DEVICE
from tests.allocations import peak_bytes
from tests.drafters.bridges import bridge_shape, drawn_continuations
from tests.exhaustive import representative
from tests.families import build

CASES = [
    ("linear", 8, 0, "llama", torch.float32, 32, 2**21, {}),
    ("linear", 0, 0, "llama", torch.bfloat16, 32, 2**21, {}),
    ("linear", 0, 0, "llama", torch.float32, 256, 2**24, {}),
    ("mlp", 0, 32, "llama", torch.float32, 32, 2**23, {}),
    ("linear", 0, 0, "gemma3_text", torch.float32, 64, 2**24, {"vocab_size": 12000}),
]
MORE = [
    ("linear", 0, 0, "llama", torch.float32, 32, 2**21, {}),
    ("linear", 0, 0, "gemma3_text", torch.float32, 32, 2**21, {}),
    ("linear", 96, 0, "llama", torch.float32, 256, 2**24, {}),
    ("mlp", 64, 64, "llama", torch.float32, 128, 2**25, {}),
    ("linear", 0, 0, "gemma3_text", torch.bfloat16, 64, 2**24, {"vocab_size": 12000}),
    ("linear", 0, 0, "llama", torch.float32, 64, 2**24, {"vocab_size": 12000}),
    ("linear", 0, 0, "llama", torch.bfloat16, 64, 2**24, {"vocab_size": 12000}),
]


@pytest.mark.skipif(DEVICE != "cpu", reason="the workspace of a GPU's solvers is not counted")
@pytest.mark.parametrize(
    ("kind", "rank", "width", "family", "dtype", "hidden", "budget", "changes", "cached"),
    representative(
        [*((*case, False) for case in CASES), *((*case, True) for case in CASES[:2])],
        [*((*case, True) for case in CASES[2:]), *((*case, cached) for case in MORE for cached in (False, True))],
    ),
)
def test_the_memory_of_a_calibration_is_bounded(
    kind: str,
    rank: int,
    width: int,
    family: str,
    dtype: torch.dtype,
    hidden: int,
    budget: int,
    changes: dict[str, int],
    cached: bool,
) -> None:
    """The peak of all tensors, from torch's profiler, while texts are read and bridges fitted."""
    target = Target(build(family, hidden_size=hidden, **changes).to(dtype))
    continuations, found = drawn_continuations(target, 200, 40, 10), []

    def work() -> None:
        text_cache = TextCache(2**30) if cached else None  # shares its tensors with the calibration
        found.append(Calibration(target, continuations, budget, max_rows=64, width=width, text_cache=text_cache))
        found[0].fit(bridge_shape(target, "layers:0;attention:1;mlp:2;layers:3", kind, rank, width))

    peak = peak_bytes(work)
    (half,) = found
    assert 0.5 * budget < peak <= budget
    assert 1 < len(half.continuations) < len(continuations)
    with pytest.raises(ValueError, match=r"^max_bytes: 100 hold not even one of 200 continuations, which takes") as few:
        Calibration(target, continuations, 100)
    assert len(Calibration(target, continuations, int(str(few.value).split()[-1])).continuations) == 1


def test_the_budget_includes_the_training_of_mlps() -> None:
    target = Target(build("llama"))
    continuations = drawn_continuations(target, 200, 40, 10)
    without, narrow, wide = (Calibration(target, continuations, 2**23, width=width) for width in (0, 1, 512))
    assert len(wide.continuations) < len(narrow.continuations) <= len(without.continuations)
    fit = narrow.fit(bridge_shape(target, "layers:1;mlp:2", "mlp", 0, 1))
    assert all(parameter.grad is None for parameter in fit.bridges.parameters())

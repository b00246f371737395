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

# Kind, rank and width of the bridges; family, dtype, width and further fields of the model; the budget.
Case = tuple[str, int, int, str, torch.dtype, int, dict[str, int], int]
CASES: list[Case] = [
    ("linear", 8, 0, "llama", torch.float32, 32, {}, 2**21),
    ("linear", 0, 0, "llama", torch.bfloat16, 32, {}, 2**21),
    ("linear", 0, 0, "llama", torch.float32, 256, {}, 2**24),
    ("mlp", 0, 32, "llama", torch.float32, 32, {}, 2**23),
    ("linear", 0, 0, "gemma3_text", torch.float32, 64, {"vocab_size": 12000}, 2**24),
]
MORE: list[Case] = [
    ("linear", 0, 0, "gemma3_text", torch.float32, 32, {}, 2**21),
    ("linear", 96, 0, "llama", torch.float32, 256, {}, 2**24),
    ("mlp", 64, 64, "llama", torch.float32, 128, {}, 2**25),
    ("linear", 0, 0, "gemma3_text", torch.bfloat16, 64, {"vocab_size": 12000}, 2**24),
    ("linear", 0, 0, "llama", torch.bfloat16, 64, {"vocab_size": 12000}, 2**24),
]


@pytest.mark.skipif(DEVICE != "cpu", reason="the workspace of a GPU's solvers is not counted")
@pytest.mark.parametrize(
    ("case", "cached"),
    representative(
        [*((case, False) for case in CASES), *((case, True) for case in CASES[:2])],
        [*((case, True) for case in CASES[2:]), *((case, cached) for case in MORE for cached in (False, True))],
    ),
)
def test_the_memory_of_a_calibration_is_bounded(case: Case, cached: bool) -> None:
    """The peak of all tensors, from torch's profiler, while texts are read and bridges fitted."""
    kind, rank, width, family, dtype, hidden, changes, budget = case
    target = Target(build(family, hidden_size=hidden, **changes).to(dtype))
    continuations, found = drawn_continuations(target, 200, 40, 10), []

    def work() -> None:
        text_cache = TextCache(2**30) if cached else None  # shares its tensors with the calibration
        found.append(Calibration(target, continuations, budget, max_rows=64, width=width, text_cache=text_cache))
        found[0].fit(bridge_shape(target, "layers:0;attention:1;mlp:2;layers:3", kind, rank, width))

    assert 0.5 * budget < peak_bytes(work) <= budget
    assert 1 < len(found[0].continuations) < len(continuations)
    with pytest.raises(ValueError, match=r"^max_bytes: 100 hold not even one of 200 continuations, which takes") as few:
        Calibration(target, continuations, 100)
    assert len(Calibration(target, continuations, int(str(few.value).split()[-1])).continuations) == 1

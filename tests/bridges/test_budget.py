"""What fitting bridges takes at once: a budget bounds it, whatever the bridges, the family and the dtype."""

from __future__ import annotations

import pytest
import torch

from layerskip.bridges.fit import Calibration
from layerskip.models.target import Target
from layerskip.scan.text_cache import Memory
from tests.accelerator import DEVICE
from tests.allocations import peak_bytes
from tests.drafters.bridges import bridge_shape, drawn_passages
from tests.families import build


@pytest.mark.skipif(DEVICE != "cpu", reason="what a GPU's solvers work in comes on top")
@pytest.mark.parametrize(
    ("kind", "rank", "width", "family", "dtype", "hidden", "budget", "changes"),
    [
        ("linear", 0, 0, "llama", torch.float32, 32, 2**21, {}),
        ("linear", 8, 0, "llama", torch.float32, 32, 2**21, {}),
        ("linear", 0, 0, "gemma3_text", torch.float32, 32, 2**21, {}),
        ("linear", 0, 0, "llama", torch.bfloat16, 32, 2**21, {}),
        ("linear", 0, 0, "llama", torch.float32, 256, 2**24, {}),
        ("linear", 96, 0, "llama", torch.float32, 256, 2**24, {}),
        ("mlp", 0, 32, "llama", torch.float32, 32, 2**23, {}),
        ("mlp", 64, 64, "llama", torch.float32, 128, 2**25, {}),
        *(
            ("linear", 0, 0, family, dtype, 64, 2**24, {"vocab_size": 12000})
            for family in ("llama", "gemma3_text")
            for dtype in (torch.float32, torch.bfloat16)
        ),
    ],
)
@pytest.mark.parametrize("remembers", [False, True])
def test_the_memory_of_a_calibration_is_bounded(
    kind: str,
    rank: int,
    width: int,
    family: str,
    dtype: torch.dtype,
    hidden: int,
    budget: int,
    changes: dict[str, int],
    remembers: bool,
) -> None:
    """All that tensors take at once, as torch's profiler counts it, while texts are read and bridges fitted."""
    target = Target(build(family, hidden_size=hidden, **changes).to(dtype))
    continuations, found = drawn_passages(target, 200, 40, 10), []

    def work() -> None:
        memory = Memory(2**30) if remembers else None  # what it keeps is what the calibration holds anyway
        found.append(Calibration(target, continuations, budget, max_rows=64, width=width, memory=memory))
        found[0].fit(bridge_shape(target, "layers:0;attention:1;mlp:2;layers:3", kind, rank, width))

    peak = peak_bytes(work)
    (half,) = found
    assert 0.5 * budget < peak <= budget
    assert half.nbytes < peak
    assert 1 < len(half.continuations) < len(continuations)
    with pytest.raises(ValueError, match=r"^most_bytes: 100 hold not even one of 200 continuations, which takes") as few:
        Calibration(target, continuations, 100)
    assert len(Calibration(target, continuations, int(str(few.value).split()[-1])).continuations) == 1


def test_what_mlps_learn_with_is_in_the_budget() -> None:
    target = Target(build("llama"))
    continuations = drawn_passages(target, 200, 40, 10)
    without, narrow, wide = (Calibration(target, continuations, 2**23, width=width) for width in (0, 1, 512))
    assert len(wide.continuations) < len(narrow.continuations) <= len(without.continuations)
    fit = narrow.fit(bridge_shape(target, "layers:1;mlp:2", "mlp", 0, 1))
    assert all(parameter.grad is None for parameter in fit.bridges.parameters())

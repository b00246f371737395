"""Reads of several tensors in one copy, and errors in one line."""

from __future__ import annotations

import pytest
import torch

from layerskip.device.transfer import _read_packed, begin_reading, copy_to_device, read_to_host
from layerskip.device.trial import first_line
from tests.accelerator import DEVICE


def test_tensors_that_are_read_together_keep_their_values_and_shapes() -> None:
    tensors = (
        torch.tensor([1, -(2**62), 2**53 + 1], device=DEVICE),
        torch.tensor([[0.1, -1e30], [float("inf"), -0.0]], device=DEVICE).T,
        torch.empty(0, dtype=torch.int64, device=DEVICE),
        torch.tensor([0.1], dtype=torch.float64, device=DEVICE),
        torch.tensor(0.1, dtype=torch.bfloat16, device=DEVICE),
    )
    expected = [[1, -(2**62), 2**53 + 1], tensors[1].tolist(), [], [0.1], tensors[4].item()]
    assert _read_packed(tensors) == read_to_host(*tensors) == expected
    assert [begin_reading(part)() for part in tensors] == expected
    for values in ([[1, 2], [3, 4]], torch.tensor([True, False])):
        assert copy_to_device(values, torch.device(DEVICE)).tolist() == torch.as_tensor(values).tolist()


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("no\nsuch thing", "no"),
        ("raised:\nLoweringException: no\n\nSet a variable", "raised: LoweringException: no"),
        ("it ends:", "it ends:"),
        ("\n", "ValueError"),
    ],
)
def test_an_error_is_one_line(message: str, line: str) -> None:
    assert first_line(ValueError(message)) == line

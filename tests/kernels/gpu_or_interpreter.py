"""Where the tests of GPU kernels run: on a GPU, or in Triton's interpreter (``TRITON_INTERPRET=1``) on a CPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from layerskip.device.trial import HAS_TRITON
from tests.accelerator import DEVICE
from tests.exhaustive import representative

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET")) and DEVICE == "cpu"
# The interpreter multiplies bfloat16 wrongly. On a GPU every kind of input is compiled, which takes seconds.
HALF = (torch.float16,) if INTERPRETED else representative((torch.bfloat16,), (torch.float16,))
needs_triton = pytest.mark.skipif(not HAS_TRITON or (DEVICE == "cpu" and not INTERPRETED), reason="needs Triton and a GPU")


def drawn(*shape: int) -> Tensor:
    """Returns normal values that are the same for every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)

"""What is laid out here, and where it can be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from layerskip.models import packing

needs_layouts = pytest.mark.skipif(not packing._multiplies(torch.float32), reason="this processor multiplies by no layouts")
DTYPES = [torch.float32, torch.bfloat16]


def layer_of(dtype: torch.dtype, bias: bool = True, width: int = 80, out: int = 112) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, out, bias, dtype=dtype)

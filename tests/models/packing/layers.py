"""Layers to pack, and a marker for tests that need a supported processor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from layerskip.models import packing

needs_packing = pytest.mark.skipif(
    not packing._is_supported(torch.float32), reason="this processor does not support packed weights"
)
DTYPES = [torch.float32, torch.bfloat16]


def layer_of(dtype: torch.dtype, bias: bool = True, width: int = 80, out: int = 112) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, out, bias, dtype=dtype)

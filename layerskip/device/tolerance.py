"""Do two passes say the same? Kernels round as they please."""

from __future__ import annotations

import torch
from torch import Tensor


def close(one: Tensor, other: Tensor) -> bool:
    """Equal up to the rounding of their dtype, measured against the larger entries; where there are none, they are."""
    if not other.numel():
        return True
    slack = 1e-4 if one.dtype == torch.float32 else 6e-2
    scale = other.float().abs().amax().clamp_min(1e-6)
    return bool((one.float() - other.float()).abs().amax() <= slack * scale)

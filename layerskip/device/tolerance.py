"""Comparison of tensors up to rounding."""

from __future__ import annotations

import torch
from torch import Tensor


def nearly_equal(tensor: Tensor, reference: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding in their dtype, relative to the largest entry of ``reference``.

    Kernels round differently, so equal computations rarely give equal bits. Empty tensors are equal.
    """
    if not reference.numel():
        return True
    tolerance = 1e-4 if tensor.dtype == torch.float32 else 6e-2
    scale = reference.float().abs().amax().clamp_min(1e-6)
    return bool((tensor.float() - reference.float()).abs().amax() <= tolerance * scale)

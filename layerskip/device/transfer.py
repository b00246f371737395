"""Copies from the host to a device that do not block the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_to_device(values: Tensor | Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy a host tensor, or integers as int64 ``[n]`` or ``[n, m]``, to a device without waiting for it."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)

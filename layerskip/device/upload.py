"""How do values get to a device without waiting for it?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Tensor | Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """On the device: a tensor of the host's, or numbers as int64, ``[n]`` or ``[n, m]``."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)

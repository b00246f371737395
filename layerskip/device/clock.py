"""What time is it for a device? The only clock in the library."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Seconds on the clock once the device has done all that it was asked."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()

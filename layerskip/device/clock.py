"""The library's only clock."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Wait until a device has finished its work, then return the clock in seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()

"""The learning rate schedule: linear warm-up, then a half cosine to zero (arXiv 1608.03983)."""

from __future__ import annotations

import math

_OFFSET = 1e-3  # makes the rate of the first step positive


def rate_factor(done: float, warming: float) -> float:
    """Return the factor of the learning rate at a share ``done`` of the training; it rises until the share ``warming``."""
    return min(1.0, (done + _OFFSET) / warming) * (1 + math.cos(math.pi * done)) / 2

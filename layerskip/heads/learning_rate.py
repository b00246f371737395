"""How does a learning rate go? Up in the first share of a training, then down a half cosine (arXiv 1608.03983)."""

from __future__ import annotations

import math

_SLIGHT = 1e-3  # so that the very first step moves


def share_of_rate(done: float, warming: float) -> float:
    """The part of a learning rate to take, where so much of the training is done, both from 0 to 1.

    Args:
        done: of the training.
        warming: the share of it in which the rate rises.
    """
    return min(1.0, (done + _SLIGHT) / warming) * (1 + math.cos(math.pi * done)) / 2

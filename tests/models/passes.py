"""Passes of tiny models on caches, which several files of tests run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache
from layerskip.models.forward import forward
from layerskip.models.graph_capture import CapturingCache
from tests.accelerator import DEVICE

LAYERS = 4
TORCH_DEVICE = torch.device(DEVICE)


def tokens_of(count: int, seed: int = 0) -> Tensor:
    """Returns random tokens, the same for every call."""
    return torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 3e-5) -> None:
    """Compares relative to the largest entry."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=float(expected.abs().max()) * tolerance)


def acquired(model: nn.Module, positions: int = 40, holder: object | None = None, layers: int = LAYERS) -> CapturingCache:
    """Takes a capturing cache from the pool."""
    cache = acquire_cache(model, layers, positions, TORCH_DEVICE, static_shapes=True, holder=holder)
    assert isinstance(cache, CapturingCache)
    return cache


def filled(cache: CapturingCache, view: nn.Module, prompt: Tensor, positions: int = 40) -> tuple[CapturingCache, KVCache]:
    """Reads a prompt into a cache and into a plain one, and returns both."""
    plain = KVCache(len(cache.layers), positions, device=DEVICE)
    for held in (cache, plain):
        forward(view, prompt, held, last=1)
        held.length = len(prompt)
    return cache, plain

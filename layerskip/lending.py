"""Which cache does a prompt get? On a GPU one that an earlier prompt had, with the passes that were recorded on it."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from .cache import KVCache
from .recording import RecordedCache

_LEAST = 512  # positions: caches come in powers of two from here on, so that most prompts find one
_MOST = 32768  # behind so many, reading what is masked takes longer than telling of kernels
_KEPT = 4  # caches of a model that wait to be lent again


def lend_cache(
    model: nn.Module, layers: int, positions: int, device: torch.device, static_shapes: bool | None = None
) -> KVCache:
    """A cache of length 0, perhaps one that was lent before, with the passes that were recorded on it.

    Args:
        model: whose.
        layers: how many write to it.
        positions: room for at least so many.
        device: where.
        static_shapes: whether passes are recorded; None: where they gain by it, on CUDA. Elsewhere recorded passes are
            computed again, in the same shapes.
    """
    if static_shapes is None:
        static_shapes = device.type == "cuda" and positions <= _MOST
    if not static_shapes:
        return KVCache(layers, positions, device=device)
    room = max(_LEAST, 1 << (positions - 1).bit_length())
    waiting = _waiting.setdefault(model, [])
    for place, cache in enumerate(waiting):
        if cache.max_length == room:
            del waiting[place]
            cache.length = 0
            return cache
    return RecordedCache(layers, room, device)


def return_cache(model: nn.Module, cache: KVCache) -> None:
    """Let a cache be lent again; nobody may use it any more."""
    if isinstance(cache, RecordedCache):
        _waiting[model] = [cache, *_waiting.get(model, ())][:_KEPT]


_waiting: weakref.WeakKeyDictionary[nn.Module, list[RecordedCache]] = weakref.WeakKeyDictionary()

"""Which cache does a prompt get? On a GPU one that an earlier prompt had, with the passes that were recorded on it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable

import torch
from torch import nn

from .cache import KVCache
from .memory import on_release
from .recording import RecordedCache

_LEAST = 512  # positions: caches come in powers of two from here on, so that most prompts find one
_MOST = 32768  # a guess: behind so many, reading what is masked takes longer than telling of kernels
_KEPT = 4  # caches of a model that wait to be lent again


def lend_cache(
    model: nn.Module,
    layers: int,
    positions: int,
    device: torch.device,
    static_shapes: bool | None = None,
    instead_of: KVCache | None = None,
) -> KVCache:
    """An empty cache, perhaps one that was lent before, with the passes that were recorded on it.

    Args:
        model: whose; a cache that was lent before its weights were moved or changed their dtype is not lent again.
        layers: how many write to it.
        positions: room for so many.
        device: where.
        static_shapes: whether passes are recorded, if the cache is not too long for that; None: where they gain by it, on
            CUDA. Elsewhere recorded passes are computed again, in the same shapes.
        instead_of: what the caller had before, which it returns.
    """
    if instead_of is not None:
        return_cache(model, instead_of)
    static_shapes = device.type == "cuda" if static_shapes is None else static_shapes
    if not static_shapes or positions > _MOST:
        return KVCache(layers, positions, device=device)
    length, made_for = max(_LEAST, 1 << (positions - 1).bit_length()), _weights(model)
    with _lock:
        waiting = [cache for cache in _waiting.pop(model, ()) if cache.made_for == made_for]
        lent = next((cache for cache in waiting if cache.max_length == length), None)
        _waiting[model] = [cache for cache in waiting if cache is not lent]
    if lent is None:
        lent = RecordedCache(layers, length, device)
        lent.made_for = made_for
    lent.clear()
    lent.room = positions
    return lent


def return_cache(model: nn.Module, cache: KVCache) -> None:
    """Let a cache be lent again; nobody may use it any more."""
    if isinstance(cache, RecordedCache):
        with _lock:
            others = [other for other in _waiting.get(model, ()) if other is not cache]
            _waiting[model] = [cache, *others][:_KEPT]


def _weights(model: nn.Module) -> tuple[Hashable, ...]:
    """Where a model's numbers lie, which is what recorded passes read."""
    return tuple((part.data_ptr(), part.dtype) for part in (*model.parameters(), *model.buffers()))


_waiting: weakref.WeakKeyDictionary[nn.Module, list[RecordedCache]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
on_release(_waiting.clear)

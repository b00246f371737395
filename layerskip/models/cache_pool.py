"""Which cache does a prompt get? On a GPU one that an earlier prompt had, with the passes that were recorded on it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Sequence

import torch
from torch import nn

from layerskip.device.memory import on_release
from layerskip.models.cache import KVCache
from layerskip.models.graph_capture import RecordedCache

_LEAST = 512  # positions: caches come in powers of two from here on, so that most prompts find one
_LARGE = 4096  # and from here on in eighths of them, as masked positions are read, too
_MOST = 32768  # a guess: behind so many, reading what is masked takes longer than telling of kernels
_KEPT = 4  # caches of a model that wait to be lent again


def acquire_cache(
    model: nn.Module,
    layers: int,
    positions: int,
    device: torch.device,
    static_shapes: bool | None = None,
    holder: object | None = None,
    reads: Sequence[nn.Module] = (),
) -> KVCache:
    """An empty cache, perhaps one that was lent before, with the passes that were recorded on it.

    Args:
        model: whose; a cache that was lent before its weights were moved or changed their dtype is not lent again, and where
            nobody can tell whether they were, nothing is recorded.
        layers: how many write to it.
        positions: room for so many.
        device: where.
        static_shapes: whether passes are recorded, if the cache is not too long for that; None: where they gain by it, on
            CUDA. Elsewhere recorded passes are computed again, in the same shapes.
        holder: has the cache until it asks for another or is gone, whereupon it may be lent again; None: until the caller
            calls :func:`release_cache`.
        reads: what recorded passes read beside the model; the same is true of its weights.
    """
    if holder in _held:
        _held.pop(holder)()  # once, though the holder may go just now
    static_shapes = device.type == "cuda" if static_shapes is None else static_shapes
    made_for = _weights(model, *reads) if static_shapes and positions <= _MOST else None
    with _lock:
        # Though none is asked for: on the device that the model has left they would wait for ever.
        waiting = _waiting[model] = [cache for cache in _waiting.get(model, ()) if cache.device == device]
        if made_for is None:
            return KVCache(layers, positions, device=device)
        length = _rounded(positions)
        waiting = [cache for cache in waiting if cache.made_for == made_for]
        lent = next((cache for cache in waiting if cache.max_length == length), None)
        _waiting[model] = [cache for cache in waiting if cache is not lent]
    if lent is None:
        lent = RecordedCache(layers, length, device)
        lent.made_for = made_for
    lent.clear()
    lent.room = positions
    if holder is not None:
        _held[holder] = weakref.finalize(holder, release_cache, model, lent)
        _held[holder].atexit = False
    return lent


def release_cache(model: nn.Module, cache: KVCache) -> None:
    """Let a cache be lent again; nobody may use it any more."""
    if isinstance(cache, RecordedCache):
        with _lock:
            others = [other for other in _waiting.get(model, ()) if other is not cache]
            _waiting[model] = [cache, *others][:_KEPT]


def one_at_a_time(model: nn.Module) -> threading.RLock:
    """What generations of several threads take turns by: drafters and the passes over trees keep what a text is at."""
    with _lock:
        return _turns.setdefault(model, threading.RLock())


def _rounded(positions: int) -> int:
    """To one of few lengths."""
    power = max(_LEAST, 1 << (positions - 1).bit_length())
    step = power if power <= _LARGE else power // 16  # of the next lower one it is an eighth
    return -(-positions // step) * step


def _weights(*models: nn.Module) -> Hashable | None:
    """Where models' numbers lie, which is what recorded passes read; None where a tensor only wraps others, as torchao's."""
    parts = [part for model in models for part in (*model.parameters(), *model.buffers())]
    found = tuple((part.data_ptr(), part.dtype) for part in parts)
    return None if any(part.numel() and not place for part, (place, _) in zip(parts, found, strict=True)) else found


_waiting: weakref.WeakKeyDictionary[nn.Module, list[RecordedCache]] = weakref.WeakKeyDictionary()
_held: weakref.WeakKeyDictionary[object, weakref.finalize[..., object]] = weakref.WeakKeyDictionary()
_turns: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # a holder may go, and return its cache, while another is lent
on_release(_waiting.clear)

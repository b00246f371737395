"""A pool of key-value caches per model. On a GPU, prompts reuse the passes that were captured on a pooled cache."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Hashable, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from layerskip.device.memory import device_bytes, on_memory_release
from layerskip.models.cache import KVCache
from layerskip.models.compiled_layers import prepare_compiling
from layerskip.models.graph_capture import CapturingCache
from layerskip.models.positions import depends_on_positions_alone
from layerskip.models.weights import is_split

_MIN_LENGTH = 512  # positions; from here on lengths are powers of two, so that most prompts find a cache
_LARGE = 4096  # from here on eighths of powers of two, because masked positions are read too
# Of the longest cache with captured passes. With 8 billion parameters and 3 TB/s, reading it takes 5 ms even where it is
# hardly used yet, as long as launching the pass's kernels.
_MAX_LENGTH = 131072
_POOLED = 4  # free caches kept per model
_FREE_SHARE = 1 / 8  # of the device's memory, for all but the latest of them
_ALIKE = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")  # whose layers all have own keys and values of one shape

_free: weakref.WeakKeyDictionary[nn.Module, list[CapturingCache]] = weakref.WeakKeyDictionary()
_held: weakref.WeakKeyDictionary[object, weakref.finalize[..., object]] = weakref.WeakKeyDictionary()
_generation_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_too_long: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models for which it was logged
_log = logging.getLogger(__name__)
_lock = threading.RLock()  # re-entrant: a holder may be collected, and release its cache, while another is acquired
on_memory_release(_free.clear)


def acquire_cache(
    model: nn.Module,
    layers: int,
    positions: int,
    device: torch.device,
    static_shapes: bool | None = None,
    holder: object | None = None,
    reads: Sequence[nn.Module] = (),
) -> KVCache:
    """Take an empty cache for so many layers and positions from the pool, with the passes captured on it, or allocate one.

    Args:
        model: the model that decodes. A pooled cache is dropped once the weights have moved or changed their dtype. Where
            this cannot be detected, nothing is captured.
        static_shapes: whether to capture passes if the cache is not too long for it; None: on CUDA. On a CPU, captured
            passes are recomputed in the same shapes.
        holder: keeps the cache until it acquires another or is garbage-collected; None: until :func:`release_cache`.
        reads: modules that captured passes read in addition to the model.
    """
    if holder in _held:
        _held.pop(holder)()  # a finalizer runs once, even if the holder is collected at this moment
    if static_shapes is None:
        static_shapes = device.type == "cuda"
    made_for = None
    if static_shapes and positions <= _MAX_LENGTH:
        prepare_compiling(model)
        made_for = _weight_addresses(model, *reads)
    elif static_shapes and model not in _too_long:
        _too_long.add(model)
        longest = f"{type(model).__name__}: a text may have {positions} tokens, more than {_MAX_LENGTH}"
        _log.warning("%s; its passes are neither captured nor compiled", longest)
    with _lock:
        # Also where no pooled cache is wanted: caches on a device that the model has left would never be used again.
        free = _free[model] = [cache for cache in _free.get(model, ()) if cache.device == device]
        if made_for is None:
            return KVCache(layers, positions)
        length, free = _rounded(positions), [cache for cache in free if cache.made_for == made_for]
        acquired = next((cache for cache in free if cache.max_length == length), None)
        _free[model] = [cache for cache in free if cache is not acquired]
    if acquired is None:
        acquired = CapturingCache(layers, length, device)
        if isinstance(model, PreTrainedModel) and model.config.model_type in _ALIKE:
            acquired.stacked_layers = layers
        acquired.made_for = made_for
    acquired.clear()
    acquired.capacity = positions
    acquired.pads_chains = isinstance(model, PreTrainedModel) and depends_on_positions_alone(model)
    if holder is not None:
        _held[holder] = weakref.finalize(holder, release_cache, model, acquired)
        _held[holder].atexit = False
    return acquired


def release_cache(model: nn.Module, cache: KVCache) -> None:
    """Return a cache to the pool; the caller must not use it any more."""
    if isinstance(cache, CapturingCache):
        with _lock:
            free = [cache, *(other for other in _free.get(model, ()) if other is not cache)][:_POOLED]
            ends = itertools.accumulate(part.nbytes for part in free)
            limit = max(cache.nbytes, _FREE_SHARE * device_bytes(cache.device))
            _free[model] = [part for part, end in zip(free, ends, strict=True) if end <= limit]


def generation_lock(model: nn.Module) -> threading.RLock:
    """Return a model's lock for generation: drafters and tree passes keep state of one text, so threads take turns."""
    with _lock:
        return _generation_locks.setdefault(model, threading.RLock())


def _rounded(positions: int) -> int:
    power = max(_MIN_LENGTH, 1 << (positions - 1).bit_length())
    step = power if power <= _LARGE else power // 16  # an eighth of the next lower power
    return -(-positions // step) * step


def _weight_addresses(*models: nn.Module) -> Hashable | None:
    """Return addresses and dtypes of all weights, which captured passes read; None if a pass cannot be captured.

    It cannot on several devices, nor with wrapper tensors as in torchao, whose addresses are unknown.
    """
    if any(map(is_split, models)):
        return None
    parts = [part for model in models for part in (*model.parameters(), *model.buffers())]
    if any(part.numel() and not part.data_ptr() for part in parts):
        return None
    return tuple((part.data_ptr(), part.dtype) for part in parts)

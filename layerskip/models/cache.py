"""A preallocated key-value cache that target and draft share; a rewind is one assignment.

All layers share ONE length. A forward pass writes its keys and values after ``length`` and attends to them. They are kept
only if the caller advances ``length``. So verification overwrites what drafting wrote, also in layers that it skipped.

Sliding-window layers keep every position too, because the mask functions of transformers cut the window out of the full
length. Recurrent state cannot rewind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from layerskip.device.transfer import copy_to_device


class CacheOverflow(ValueError):
    """Keys or values of a text that are too large for float16."""


class _Layer(CacheLayerMixin):
    """The keys and values of one layer, after its first pass; the length belongs to the cache."""

    keys: Tensor
    values: Tensor
    is_sliding = False

    def __init__(self, owner: KVCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """True if shapes are static. Transformers then keeps the mask of a single query, which hides unused positions."""
        return self._owner.static_shapes

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate keys and values, ``[B, heads, max_length, head_dim]``, in the dtype and on the device of the states."""
        self.keys, self.values = self._owner.allocate(key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write states ``[B, heads, n, head_dim]`` after the length and return everything up to their end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[-2]
        start, end = self._owner.length, self._owner.length + count
        if end > self._owner.max_length:
            raise IndexError(f"cache: {end} positions are needed, but only {self._owner.max_length} are allocated")
        if self._owner.static_shapes:
            return LayerBuffers(self.keys, self.values, self._owner.positions(count)).update(key_states, value_states)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer[:, :, start:end].copy_(_without_overflows(states) if self._owner.may_be_static else states)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return ``(key length, offset)`` of the attention mask for ``query_length`` new positions."""
        return (self._owner.max_length if self._owner.static_shapes else self._owner.length + query_length), 0

    def get_seq_length(self) -> int:
        return self._owner.position  # type: ignore[return-value]  # a tensor with static shapes, as in StaticLayer

    def get_max_length(self) -> int:
        return self._owner.max_length

    get_max_cache_shape = get_max_length  # the name before transformers 5.20


@dataclass(eq=False)
class LayerBuffers:
    """One layer's ``[B, heads, max_length, head_dim]`` as a compiled layer writes it at ``positions``, ``[n]`` int64."""

    keys: Tensor
    values: Tensor
    positions: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write states ``[B, heads, n, head_dim]`` and return the whole buffers."""
        self.keys.index_copy_(2, self.positions, _without_overflows(key_states))
        self.values.index_copy_(2, self.positions, _without_overflows(value_states))
        return self.keys, self.values


def _without_overflows(states: Tensor) -> Tensor:
    """Return states that can be read under a mask, as an overflow times 0 spoils a sum; only float16 overflows."""
    return states.nan_to_num(0.0, 0.0, 0.0) if states.dtype == torch.float16 else states


class KVCache(Cache):
    """A preallocated key-value cache whose layers share one length.

    Decoding may use ``capacity`` positions; a cache from the pool may have more (``max_length``). With ``static_shapes``,
    which may change between passes if it was True at first, passes read the whole buffers under a mask, at a position stored
    on ``device``. So shapes never change, which CUDA graphs need. Otherwise a pass reads only the part in use.
    """

    def __init__(
        self, layers: int, max_length: int, static_shapes: bool = False, device: torch.device | str = "cpu"
    ) -> None:
        self.max_length = self.capacity = max_length
        self.static_shapes = static_shapes
        self._layers = [_Layer(self) for _ in range(layers)]
        super().__init__(layers=list(self._layers))
        self._device_length = torch.zeros((), dtype=torch.int64, device=device) if static_shapes else None
        self._device_value = self._length = 0

    @property
    def length(self) -> int:
        """Verified positions. Assign to it to commit or to rewind; forward passes never change it."""
        return self._length

    @length.setter
    def length(self, value: int) -> None:
        if not 0 <= value <= self.max_length:
            raise IndexError(f"cache: length {value} is not within 0 to {self.max_length}")
        self._length = value

    @property
    def may_be_static(self) -> bool:
        """True if some passes may read positions after the length."""
        return self._device_length is not None

    @property
    def position(self) -> int | Tensor:
        """The length as forward passes read it: a 0-d int64 tensor with static shapes, else an int."""
        return self._on_device() if self.static_shapes else self._length

    def _on_device(self) -> Tensor:
        """Return the length as a 0-d tensor, updated only when it is read, because each update costs host time."""
        assert self._device_length is not None
        if self._device_value != self._length:
            self._device_length.fill_(self._length)
            self._device_value = self._length
        return self._device_length

    def positions(self, count: int) -> Tensor:
        """Return the next positions, ``[count]`` int64 on the device; requires static shapes."""
        length = self._on_device()
        return torch.arange(count, device=length.device) + length

    def allocate(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's buffers for keys and values like the given states ``[B, heads, n, head_dim]``."""
        # Zeros, not empty: with static shapes masked positions are read too, and NaN times 0 is NaN.
        keys, values = (
            states.new_zeros(*states.shape[:2], self.max_length, states.shape[3]) for states in (key_states, value_states)
        )
        return keys, values

    def copy_from(self, parts: Sequence[tuple[KVCache, int]]) -> None:
        """Fill the cache with the first positions of other caches, as many as given; the length is then their end.

        :class:`CacheOverflow` refuses what is not finite: passes over it would give NaN, or replace overflows.
        """
        finite, start = [], 0
        for other, count in parts:
            for states, given in self._pairs(other):
                states[:, :, start : start + count] = given[:, :, :count]
                if given.dtype == torch.float16:  # only float16 overflows in practice
                    finite.append(given[:, :, :count].isfinite().all())
            start += count
        if not all(part.item() for part in finite):
            reason = "float16 overflows in keys or values of this text; bfloat16 and float32 do not"
            raise CacheOverflow(f"target.dtype: {reason}")
        self.length = start

    def copy_ends(self, other: KVCache, first: int, last: int) -> None:
        """Fill the cache with the first and the last positions of another one; the length is then their number."""
        for states, given in self._pairs(other):
            states[:, :, :first] = given[:, :, :first]
            states[:, :, first : first + last] = given[:, :, other.length - last : other.length]
        self.length = first + last

    def _pairs(self, other: KVCache) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and the values of every layer with those of another cache; allocate what is missing."""
        for layer, source in zip(self._layers, other._layers, strict=True):
            if not source.is_initialized:  # it shares another layer's keys and values
                continue
            if not layer.is_initialized:
                layer.lazy_initialization(source.keys, source.values)
            yield from ((layer.keys, source.keys), (layer.values, source.values))

    def gather(self, offsets: Sequence[int]) -> None:
        """Keep, of the positions after the length, those at some rising offsets, one after the other. The length stays."""
        if list(offsets) == list(range(len(offsets))):
            return
        begin, end = self._length, self._length + len(offsets)
        positions = copy_to_device(offsets, self.buffers()[0].device) + begin
        for states in self.buffers():
            positions = positions.to(states.device)  # layers may be on several devices
            states[:, :, begin:end] = states.index_select(2, positions)

    def room(self, layer: int, count: int) -> tuple[Tensor, Tensor] | None:
        """Return a layer's keys and values, ``[B, heads, max_length, head_dim]``, for a kernel that writes them itself.

        There are none before the first pass, with static shapes, or if ``count`` positions do not fit.
        """
        own, fits = self._layers[layer], not self.may_be_static and self._length + count <= self.max_length
        return (own.keys, own.values) if fits and own.is_initialized else None

    def layer_buffers(self, layer: int, count: int) -> LayerBuffers:
        """Return a layer's keys and values for a compiled pass over ``count`` tokens; requires static shapes."""
        return LayerBuffers(self._layers[layer].keys, self._layers[layer].values, self.positions(count))

    def buffers(self) -> list[Tensor]:
        """Return the allocated keys and values of all layers, one after the other."""
        return [part for layer in self._layers if layer.is_initialized for part in (layer.keys, layer.values)]

    @property
    def nbytes(self) -> int:
        return sum(states.nbytes for states in self.buffers())

"""Where do keys and values live, so that target and draft share them and a rewind is one assignment?

One buffer per layer, allocated once, and ONE length for all of them. A forward pass writes its keys and values behind
``length`` and sees them; nothing is kept until someone moves ``length``. So a draft pass that skips a layer leaves no layer
behind another, verification simply overwrites what drafting wrote, and rejecting tokens is ``cache.length = n``.

Sliding-window layers keep every position as well: transformers' own mask functions cut the window out of the full length,
so those layers can be rewound past their window too. What cannot rewind is recurrent state; asking for it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from layerskip.device.upload import upload


class CacheFull(ValueError):
    """A forward pass would write behind the cache's last position."""


class _Layer(CacheLayerMixin):
    """The keys and values of one layer; its length is its owner's."""

    is_sliding = False
    is_croppable = False

    def __init__(self, owner: KVCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Transformers drops the mask of a single query unless the cache is of a kind that it would compile; with static
        shapes that mask is what hides the positions behind the length."""
        return self._owner.static_shapes

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate ``[B, heads, max_length, head_dim]`` for keys and for values, as the first states ask for."""

        # Zeros, not empty: with static shapes masked positions are read too, and NaN times 0 is NaN.
        def buffer(states: Tensor) -> Tensor:
            batch, heads, _, dim = states.shape
            return states.new_zeros(batch, heads, self._owner.max_length, dim)

        self.keys, self.values = buffer(key_states), buffer(value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write states of shape ``[B, heads, n, head_dim]`` behind the length, and return all up to their end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        start, end = self._owner.length, self._owner.length + key_states.shape[-2]
        if end > self._owner.max_length:
            raise CacheFull(f"cache: {end} positions are needed, {self._owner.max_length} are there")
        if self._owner.may_be_static and key_states.dtype == torch.float16:
            # Masked positions will be read, and what overflowed spoils a sum even when it is multiplied by 0. No other dtype
            # overflows in practice, and this takes kernels in every layer.
            key_states, value_states = (states.nan_to_num(0.0, 0.0, 0.0) for states in (key_states, value_states))
        if self._owner.static_shapes:
            positions = self._owner.positions(key_states.shape[-2])
            self.keys.index_copy_(2, positions, key_states)
            self.values.index_copy_(2, positions, value_states)
            return self.keys, self.values
        self.keys[:, :, start:end].copy_(key_states)
        self.values[:, :, start:end].copy_(value_states)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(key length, offset)`` that the attention mask must have for ``query_length`` new positions."""
        return (self._owner.max_length if self._owner.static_shapes else self._owner.length + query_length), 0

    def get_seq_length(self) -> int:
        """The shared length, as transformers asks for it."""
        return self._owner.position  # type: ignore[return-value]  # a tensor with static shapes, as in StaticLayer

    def get_max_length(self) -> int:
        """Positions that there is room for."""
        return self._owner.max_length

    get_max_cache_shape = get_max_length  # the name before transformers 5.20


class KVCache(Cache):
    """A preallocated key-value cache whose layers share one length.

    Args:
        layers: how many decoder layers write to it.
        max_length: positions to allocate.
        static_shapes: whether every pass reads the whole buffers under a mask, at a position that lives on the device;
            the shapes then never change, which is what CUDA graphs need. Without it a pass reads just the part in use.

    Attributes:
        length: verified positions. Assign to commit or to rewind; forward passes never move it.
        room: positions that were asked for; there may be more.
        static_shapes: as above; may change from pass to pass where it was True at first.
    """

    def __init__(
        self, layers: int, max_length: int, static_shapes: bool = False, device: torch.device | str = "cpu"
    ) -> None:
        self.max_length = self.room = max_length
        self.static_shapes = static_shapes
        self._layers = [_Layer(self) for _ in range(layers)]
        super().__init__(layers=list(self._layers))
        self._device_length = torch.zeros((), dtype=torch.int64, device=device) if static_shapes else None
        self._told = self._length = 0

    @property
    def length(self) -> int:
        return self._length

    @length.setter
    def length(self, value: int) -> None:
        if not 0 <= value <= self.max_length:
            raise CacheFull(f"cache: length {value} is not within 0 to {self.max_length}")
        self._length = value

    @property
    def may_be_static(self) -> bool:
        """Whether some passes read what lies behind the length, whoever wrote it."""
        return self._device_length is not None

    @property
    def position(self) -> int | Tensor:
        """The length in the form that forward passes read: a 0-d int64 tensor with static shapes."""
        return self._on_device() if self.static_shapes else self._length

    def _on_device(self) -> Tensor:
        """The length as a 0-d tensor, told only where it is read, as telling takes the host time."""
        assert self._device_length is not None
        if self._told != self._length:
            self._device_length.fill_(self._length)
            self._told = self._length
        return self._device_length

    def positions(self, count: int) -> Tensor:
        """``[count]`` int64: the next positions, on the device; only with static shapes."""
        length = self._on_device()
        return torch.arange(count, device=length.device) + length

    def take(self, parts: Sequence[tuple[KVCache, int]]) -> None:
        """Fill the cache with the first positions of others, one behind the other, and set the length to their end.

        Args:
            parts: caches of the same model, each with how many of its positions to take.
        """
        for index, layer in enumerate(self._layers):
            start = 0
            for other, count in parts:
                source = other._layers[index]
                if source.keys is None or source.values is None:  # a layer that keeps none, as it shares another's
                    continue
                if not layer.is_initialized:
                    layer.lazy_initialization(source.keys, source.values)
                assert layer.keys is not None
                assert layer.values is not None
                layer.keys[:, :, start : start + count] = source.keys[:, :, :count]
                layer.values[:, :, start : start + count] = source.values[:, :, :count]
                start += count
        self.length = sum(count for _, count in parts)

    def gather(self, places: Sequence[int]) -> None:
        """Move what lies behind the length so that it begins with some of it, in order; the length stays.

        Args:
            places: rising, counted from the length on.
        """
        if list(places) == list(range(len(places))):
            return
        device = next((layer.keys.device for layer in self._layers if layer.keys is not None), None)
        self.repeat(len(self._layers), upload(places, device or torch.device("cpu")) + self._length)

    def repeat(self, layers: int, places: Tensor) -> None:
        """Write behind the length, in the first layers, what stands at some positions; the length stays.

        Args:
            layers: how many.
            places: ``[n]`` int64.
        """
        begin, end = self._length, self._length + places.shape[0]
        for keys, values in self.states()[:layers]:
            if keys is not None and values is not None:
                keys[:, :, begin:end] = keys.index_select(2, places)
                values[:, :, begin:end] = values.index_select(2, places)

    def states(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """Every layer's keys and values, ``[B, heads, max_length, head_dim]``; None where it keeps none."""
        return [(layer.keys, layer.values) for layer in self._layers]

    def buffers(self) -> list[Tensor]:
        """All keys and values that there are, layer by layer."""
        return [part for layer in self.states() for part in layer if part is not None]

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return sum(t.numel() * t.element_size() for t in self.buffers())

    @property
    def is_written(self) -> bool:
        """Whether any layer has put something in."""
        return any(layer.is_initialized for layer in self._layers)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Where the next pass's first position lies, for the attention mask."""
        return self.position

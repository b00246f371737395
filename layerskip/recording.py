"""How does a GPU run a pass without being told every kernel? A pass is recorded once, and replayed from then on.

A small model's pass is a thousand kernels of a few microseconds each, and telling the device of them takes longer than
running them. CUDA graphs (CUDA C++ Programming Guide, "CUDA Graphs") hold them all. They need shapes and addresses that
never change, so recorded passes read a cache's whole buffers under a mask, and :mod:`layerskip.lending` keeps the caches.
All else, as a prompt's first pass, reads the part in use and runs as it is.

Not every model can be recorded. One that asks the device for a value, as some mixtures of experts do, is found out in a pass
that forbids it; one that reckons with the shapes of keys, by comparing what the first pass of each shape says. They run as
they are.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .cache import KVCache
from .clock import now
from .closeness import close
from .memory import out_of_memory
from .upload import upload

Compute = Callable[..., tuple[Tensor, ...]]
"""Inputs, tensors on the device, to what a pass says; all else that differs from pass to pass is read from the device."""

_WIDEST = 64  # tokens of a recorded pass
_MOVED = 8  # positions are moved by multiples of so many


class RecordedCache(KVCache):
    """A cache that remembers the passes which ran on it.

    Args:
        layers: how many decoder layers write to it.
        max_length: positions to allocate.
        device: where.
    """

    def __init__(self, layers: int, max_length: int, device: torch.device) -> None:
        super().__init__(layers, max_length, static_shapes=True, device=device)
        self.static_shapes = False
        self._device = device
        self._places: dict[int, Tensor] = {}  # the next ones, by how many; of one pass
        self._moves: dict[int, _Pass] = {}
        self._passes: weakref.WeakKeyDictionary[nn.Module, dict[tuple[object, ...], _Pass]] = weakref.WeakKeyDictionary()
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def records(self, model: nn.Module, width: int) -> bool:
        """Whether passes over so many tokens are recorded here, behind what is in the cache."""
        fits = width <= _WIDEST and self.length + width <= self.max_length
        return self.length > 0 and fits and torch.is_inference_mode_enabled() and model not in _refused

    def knows(self, model: nn.Module, kind: Hashable, inputs: Sequence[Tensor]) -> bool:
        """Whether such a pass was recorded; see :meth:`replay`."""
        return _key(kind, inputs) in self._passes.get(model, ())

    def record(self, model: nn.Module, kind: Hashable, inputs: Sequence[Tensor], compute: Compute) -> bool:
        """Record a pass unless it was; see :meth:`replay`. Returns whether it can be."""
        key, passes = _key(kind, inputs), self._passes.setdefault(model, {})
        if key in passes:
            return True
        afresh = self._afresh(compute)
        with self._recording():
            expected = afresh(*inputs)
            made = self._made(inputs, afresh, expected)
        if made is None:
            _refused.add(model)
            return False
        passes[key] = made
        return True

    def _made(self, inputs: Sequence[Tensor], compute: Compute, expected: tuple[Tensor, ...]) -> _Pass | None:
        """A recorded pass that says what is expected; None where there is none."""
        try:
            with self._static():
                made = self._make(inputs, compute)
                found = made.replay(inputs, compute)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            return None
        return made if all(map(close, found, expected)) else None

    def replay(
        self, model: nn.Module, kind: Hashable, inputs: Sequence[Tensor], compute: Compute
    ) -> tuple[Tensor, ...] | None:
        """A pass behind ``length``, which is recorded if it is the first of its shapes.

        Args:
            model: whose pass it is.
            kind: what tells it from others of the same shapes.
            inputs: what differs from pass to pass, beside the cache.
            compute: makes the pass of the inputs.

        Returns:
            What ``compute`` returns; None where that cannot be recorded.
        """
        if not self.record(model, kind, inputs, compute):
            return None
        self._on_device()
        with self._static():
            return self._passes[model][_key(kind, inputs)].replay(inputs, self._afresh(compute))

    def _afresh(self, compute: Compute) -> Compute:
        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            self._places = {}  # else a graph would read those of the pass before
            return compute(*inputs)

        return run

    def positions(self, count: int) -> Tensor:
        """The same for all layers of a pass."""
        if count not in self._places:
            self._places[count] = super().positions(count)
        return self._places[count]

    def gather(self, places: Sequence[int]) -> None:
        """In one go; what stays where it is fills the number up to one of few."""
        width = -(-len(places) // _MOVED) * _MOVED
        stay = list(range(width))
        if self.length + width > self.max_length:
            super().gather(places)
        elif list(places) != stay[: len(places)]:
            if width not in self._moves:  # what stays can be moved as often as recording asks for
                with self._recording(), self._static():
                    self._moves[width] = self._make((upload(stay, self._device),), self._move)
            self._on_device()
            with self._static():
                self._moves[width].replay((upload([*places, *stay[len(places) :]], self._device),), self._move)

    def _move(self, places: Tensor) -> tuple[Tensor, ...]:
        self._places = {}
        here = self.positions(places.shape[0])
        for states in (part for layer in self.states() for part in layer if part is not None):
            states.index_copy_(2, here, states.index_select(2, self._on_device() + places))
        return ()

    def _make(self, inputs: Sequence[Tensor], compute: Compute) -> _Pass:
        return _Anew() if self._pool is None else _record(self._pool, inputs, compute)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        global _seconds
        start = now(self._device)
        self._on_device()  # else the telling would be recorded
        try:
            yield
        finally:
            _seconds += now(self._device) - start

    @contextlib.contextmanager
    def _static(self) -> Iterator[None]:
        self.static_shapes = True
        try:
            yield
        finally:
            self.static_shapes = False


def _key(kind: Hashable, inputs: Sequence[Tensor]) -> tuple[Hashable, ...]:
    return kind, *(part.shape for part in inputs)


class _Pass(Protocol):
    """A recorded pass."""

    def replay(self, inputs: Sequence[Tensor], compute: Compute) -> tuple[Tensor, ...]:
        """Run it on other inputs of the same shapes."""


class _Anew:
    """Where there are no graphs: the same shapes, computed each time."""

    def replay(self, inputs: Sequence[Tensor], compute: Compute) -> tuple[Tensor, ...]:
        """Run it."""
        return compute(*inputs)


@dataclass(frozen=True)
class _Graph:
    """A CUDA graph.

    Args:
        graph: the kernels.
        inputs: where it reads them.
        found: where it writes what it says.
    """

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    found: tuple[Tensor, ...]

    def replay(self, inputs: Sequence[Tensor], compute: Compute) -> tuple[Tensor, ...]:
        """Run it; what it says is copied, as the next replay writes there again."""
        for place, part in zip(self.inputs, inputs, strict=True):
            place.copy_(part)
        self.graph.replay()
        return tuple(part.clone() for part in self.found)


def _record(pool: Any, inputs: Sequence[Tensor], compute: Compute) -> _Graph:
    """A pass as a graph; a RuntimeError where it waits for the device, which no graph can."""
    places = tuple(part.clone() for part in inputs)
    waits = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        compute(*places)
    finally:
        torch.cuda.set_sync_debug_mode(waits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        found = compute(*places)
    return _Graph(graph, places, found)


def seconds_recording() -> float:
    """What recording has taken in this process, which every user pays once and no measurement of decoding should show."""
    return _seconds


_seconds = 0.0
_refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()

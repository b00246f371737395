"""What is a recorded pass? On a GPU a CUDA graph; elsewhere the same pass, made anew. See :mod:`layerskip.models.graph_capture`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Compute = Callable[..., tuple[Tensor, ...]]
"""Inputs, tensors on the device, to what a pass says; all else that differs from pass to pass is read from the device."""


class Pass(Protocol):
    """A recorded pass."""

    def replay(self, inputs: Sequence[Tensor], compute: Compute) -> tuple[Tensor, ...]:
        """Run it on other inputs of the same shapes."""
        ...

    def blank(self) -> None:
        """Forget what it said when it was recorded."""


class Anew:
    """Where there are no graphs: the same shapes, computed each time."""

    def replay(self, inputs: Sequence[Tensor], compute: Compute) -> tuple[Tensor, ...]:
        """Run it."""
        return compute(*inputs)

    def blank(self) -> None:
        """There is nothing."""


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

    def blank(self) -> None:
        """Nothing but the graph itself can say again what recording said."""
        for part in self.found:
            part.fill_(float("nan"))


class Recorder:
    """Records passes on one GPU, in one pool of memory, one by one.

    All recorders of a GPU share a stream, as torch keeps working memory of its libraries for every one that they ran on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, inputs: Sequence[Tensor], compute: Compute) -> _Graph:
        """A pass as a graph; a RuntimeError where it waits for the device, which no graph can."""
        places = tuple(part.clone() for part in inputs)
        waits = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a prototype, each time
            torch.cuda.set_sync_debug_mode("error")
            try:
                compute(*places)
            finally:
                torch.cuda.set_sync_debug_mode(waits)
        graph = torch.cuda.CUDAGraph()
        # A graph that cannot be ended would leave its stream the current one.
        here = torch.cuda.stream(torch.cuda.current_stream(self._device))
        within = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.device(self._device), here, within:
            found = compute(*places)
        return _Graph(graph, places, found)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

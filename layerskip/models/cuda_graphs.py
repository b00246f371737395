"""CUDA graphs, and a stand-in for devices without them. Used by :mod:`layerskip.models.graph_capture`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from layerskip.device.waiting import waiting
from layerskip.kernels.decode_attention import own_counters

Compute = Callable[..., tuple[Tensor, ...]]
"""A pass: device tensors in, device tensors out. Everything else that changes between passes is read from the device."""


class CapturedPass(Protocol):
    """A pass that was captured once and can be replayed."""

    def replay(self, inputs: Sequence[Tensor], compute: Compute) -> tuple[Tensor, ...]:
        """Run the pass on other inputs of the same shapes."""
        ...

    def blank(self) -> None:
        """Overwrite the outputs of the capture, so that only a replay can produce them again."""


class EagerPass:
    """The stand-in without graphs: the same shapes, computed on every replay."""

    def replay(self, inputs: Sequence[Tensor], compute: Compute) -> tuple[Tensor, ...]:
        """Compute the pass."""
        return compute(*inputs)

    def blank(self) -> None:
        """Do nothing; no output is kept."""


@dataclass(frozen=True)
class _Graph:
    """A CUDA graph with its static tensors.

    Args:
        graph: the captured kernels.
        inputs: the tensors that the kernels read.
        outputs: the tensors that the kernels write.
    """

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def replay(self, inputs: Sequence[Tensor], compute: Compute) -> tuple[Tensor, ...]:
        """Run the graph and copy its outputs, which the next replay overwrites."""
        for static, given in zip(self.inputs, inputs, strict=True):
            static.copy_(given)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)

    def blank(self) -> None:
        """Fill the outputs with NaN."""
        for output in self.outputs:
            output.fill_(float("nan"))


class GraphCapturer:
    """A capturer of passes on one GPU into one memory pool.

    All capturers of a GPU share one stream, because torch keeps library workspaces for every stream that was used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, inputs: Sequence[Tensor], compute: Compute) -> _Graph:
        """Capture a pass as a graph.

        Raises:
            RuntimeError: the pass synchronises with the device, which a graph cannot.
        """
        static = tuple(part.clone() for part in inputs)
        with waiting("error"):
            compute(*static)
        graph = torch.cuda.CUDAGraph()
        # A graph whose capture cannot end would leave its stream as the current one.
        current = torch.cuda.stream(torch.cuda.current_stream(self._device))
        capturing = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.device(self._device), current, own_counters(), capturing:
            outputs = compute(*static)
        return _Graph(graph, static, outputs)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

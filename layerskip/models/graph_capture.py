"""A key-value cache on which forward passes are captured once as CUDA graphs and replayed from then on.

A CUDA graph (CUDA C++ Programming Guide, "CUDA Graphs") launches all kernels of a pass at once. It needs shapes and
addresses that never change, so a captured pass reads the whole buffers of a cache under a mask, and
:mod:`layerskip.models.cache_pool` keeps the caches. Other passes, such as a prompt's first one, run eagerly.

Some models always run eagerly. A pass that reads a value back from the device, as some mixtures of experts do, fails in a
trial run that forbids synchronisation. A model that computes with the number of keys is detected because its first captured
pass of each shape differs from the eager one. Other failures may pass: one is not enough. Without memory, idle caches are
freed, and if that does not suffice, nothing more is captured for the text.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import subprocess
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.device.memory import is_out_of_memory, release_memory, within_memory
from layerskip.device.transfer import copy_to_device, now, waiting
from layerskip.device.trial import first_line, nearly_equal
from layerskip.kernels.decode_attention import own_counters
from layerskip.models.attention import whole_buffers
from layerskip.models.cache import KVCache
from layerskip.models.compiled_layers import CompiledLayers, MaskOf, compiled_layers, simplify_compiling

_MAX_WIDTH = 64  # tokens of a captured pass
_WIDTH_STEP = 8  # tokens
_STACKED = 8  # layers; those of some models differ in shape, or share buffers, and would leave more unused
_DEVICE_LOST = ("device-side assert", "illegal memory access")  # after these errors nothing runs on the device any more
_seconds = 0.0
_lock = threading.RLock()  # one capture at a time, as forbidding synchronisation applies to all threads
_log = logging.getLogger(__name__)
_failed: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # once, which may pass
_refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()

Compute = Callable[..., tuple[Tensor, ...]]
"""A pass: device tensors in, device tensors out. Everything else that changes between passes is read from the device."""


class CapturedPass:
    """The stand-in for a captured pass where there are no graphs: the same shapes, computed on every replay."""

    layers: CompiledLayers | None = None  # that it runs; None if they run as they are

    def replay(self, inputs: Sequence[Tensor], compute: Compute) -> tuple[Tensor, ...]:
        """Return the outputs of the pass for inputs of its shapes."""
        return compute(*inputs)

    def blank(self) -> None:
        """Fill kept outputs with NaN, so that only a replay can produce them again."""


class _Graph(CapturedPass):
    """A pass that was captured as a CUDA graph, with the static tensors of its kernels; ``RuntimeError`` if it synchronises.

    All captures on a GPU share one stream, because torch keeps library workspaces for every stream that was used.
    """

    def __init__(self, device: torch.device, pool: Any, inputs: Sequence[Tensor], compute: Compute) -> None:
        self._inputs = tuple(part.clone() for part in inputs)
        with waiting("error"):
            compute(*self._inputs)
        self._graph = torch.cuda.CUDAGraph()
        # A graph whose capture cannot end would leave its stream as the current one.
        current = torch.cuda.stream(torch.cuda.current_stream(device))
        capturing = torch.cuda.graph(self._graph, pool=pool, stream=_stream(device), capture_error_mode="thread_local")
        with torch.cuda.device(device), current, own_counters(), capturing:
            self._outputs = compute(*self._inputs)

    def replay(self, inputs: Sequence[Tensor], compute: Compute) -> tuple[Tensor, ...]:
        for static, given in zip(self._inputs, inputs, strict=True):
            static.copy_(given)
        self._graph.replay()
        return tuple(output.clone() for output in self._outputs)  # the next replay overwrites them

    def blank(self) -> None:
        for output in self._outputs:
            output.fill_(float("nan"))


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def padded_count(count: int) -> int:
    """Round a number of tokens up to a multiple of 8, so that few shapes are captured."""
    return -(-count // _WIDTH_STEP) * _WIDTH_STEP


def capture_seconds() -> float:
    """Return the seconds of capturing in this process; measurements of decoding subtract this one-time cost."""
    return _seconds


class CapturingCache(KVCache):
    """A key-value cache that captures the passes that run on it.

    Attributes:
        stacked_layers: the most layers whose buffers are parts of one tensor.
        pads_chains: whether a pass over a chain may be followed by positions that are not used.
        made_for: the weights and dtypes for which everything captured is valid; see :mod:`layerskip.models.cache_pool`.
    """

    stacked_layers = _STACKED
    pads_chains = True
    made_for: Hashable = None

    def __init__(self, layers: int, max_length: int, device: torch.device) -> None:
        super().__init__(layers, max_length, static_shapes=True, device=device)
        self.static_shapes, self.device = False, device
        self._next_positions: dict[int, Tensor] = {}  # of the current pass, by count
        self._moves: dict[int, CapturedPass | None] = {}  # by count; None where it cannot be captured
        self._is_full = False  # memory ran out, and nothing more is captured for this text
        self._stacks: list[Tensor] = []  # [buffers, B, heads, max_length, head_dim], of which layers have parts
        self._unused: dict[Hashable, list[Tensor]] = {}  # parts, by shape and dtype
        self._passes = weakref.WeakKeyDictionary[nn.Module, dict[tuple[object, ...], CapturedPass]]()
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def allocate(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return parts of tensors that the first layer of a shape reserves for others, so that a move takes few kernels."""
        layers = sum(not layer.is_initialized for layer in self._layers)
        count = min(layers, self.stacked_layers) * (1 + (key_states.shape == value_states.shape))
        keys, values = (self._part(states, count) for states in (key_states, value_states))
        return keys, values

    def _part(self, states: Tensor, count: int) -> Tensor:
        batch, heads, _, width = states.shape
        unused = self._unused.setdefault((batch, heads, width, states.dtype), [])
        if not unused:
            shape = count, batch, heads, self.max_length, width
            stack = within_memory(lambda: states.new_zeros(shape))
            stack = states.new_zeros(shape) if stack is None else stack  # idle caches were freed
            self._stacks.append(stack)
            unused += [stack[index] for index in reversed(range(count))]
        return unused.pop()

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(stack.nbytes for stack in self._stacks)

    def captures(self, model: nn.Module, width: int) -> bool:
        """Return whether a pass over ``width`` tokens at the current length is captured."""
        if not 0 < self.length <= self.max_length - width or width > _MAX_WIDTH or model in _refused:
            return False
        # Autocast frees its converted weights when it ends, and graphs compute no gradients.
        return torch.is_inference_mode_enabled() and not torch.is_autocast_enabled(self.device.type)

    def replay(
        self,
        model: nn.Module,
        kind: Hashable,
        inputs: Sequence[Tensor],
        compute: Compute,
        body: nn.Module | None = None,
        mask_of: MaskOf = lambda mask: mask,
    ) -> tuple[Tensor, ...]:
        """Run a pass after ``length``, and capture it if it is the first of its shapes.

        Args:
            model: the model that the pass belongs to; :meth:`captures` must have returned True for it.
            kind: distinguishes passes of the same shapes.
            inputs: what changes between passes, apart from the cache, for ``compute``.
            compute: the pass.
            body: the Hugging Face model whose layers may be compiled; None for ``model`` itself.
            mask_of: converts the attention mask of compiled layers.
        """

        def fresh(layers: CompiledLayers | None) -> Compute:
            def run(*inputs: Tensor) -> tuple[Tensor, ...]:
                self._next_positions = {}  # else a graph would read the positions of an earlier pass
                with contextlib.nullcontext() if layers is None else layers.running(mask_of):
                    return compute(*inputs)

            return run

        key = kind, compiled_layers(body or model) is None, *(part.shape for part in inputs)
        passes = self._passes.setdefault(model, {})
        if key not in passes:
            captured = None
            if not self._is_full:
                with self._capturing():
                    captured = self._within_memory(lambda: self._capture_checked(model, body or model, inputs, fresh))
            if captured is None:
                return fresh(None)(*inputs)
            key = kind, compiled_layers(body or model) is None, *key[2:]  # compiling may have been refused
            passes[key] = captured
        self._on_device()
        with self._static():
            return passes[key].replay(inputs, fresh(passes[key].layers))

    def _capture_checked(
        self,
        model: nn.Module,
        body: nn.Module,
        inputs: Sequence[Tensor],
        compute_with: Callable[[CompiledLayers | None], Compute],
    ) -> CapturedPass | None:
        """Capture a pass that gives the eager results, with compiled layers if possible; None if there is none."""
        expected = compute_with(None)(*inputs)
        if any(bool(part.isnan().any()) for part in expected):
            return None  # cannot be compared
        layers = compiled_layers(body)
        attempts: list[tuple[CompiledLayers | None, bool]] = [] if layers is None else [(layers, True)] * (1 + layers.fuses)
        attempts += [(None, True), (None, False)] if self.device.type == "cuda" else [(None, True)]
        for tried, kernels in attempts:
            compute, may_pass = compute_with(tried), False
            try:
                with self._static(kernels):
                    if tried is not None:
                        compute(*inputs)  # compiling may wait for the device, which capturing forbids
                    captured = self._capture(inputs, compute)
                    captured.blank()
                    outputs = captured.replay(inputs, compute)
                if all(map(nearly_equal, outputs, expected)):
                    _failed.discard(model)
                    captured.layers = tried
                    return captured
                reason = "the captured pass gives other results"
            except Exception as error:  # compilers raise errors of many kinds
                if _is_device_lost(error) or (tried is None and not isinstance(error, (RuntimeError, MemoryError))):
                    raise
                if out := next(filter(is_out_of_memory, _causes(error)), None):
                    raise out from None
                # Compilers write files and start processes.
                may_pass = any(isinstance(cause, (OSError, subprocess.SubprocessError)) for cause in _causes(error))
                reason = first_line(error)
                _log.debug("the pass of %s fails", type(model).__name__, exc_info=error)
            if tried is not None:
                simplify_compiling(body, tried, reason, may_pass)
        if model in _failed:
            _refused.add(model)
            _log.warning("%s: its passes cannot be captured and run eagerly: %s", type(model).__name__, reason)
        _failed.add(model)
        return None

    def _within_memory(self, capture: Callable[[], CapturedPass | None]) -> CapturedPass | None:
        """Return what is captured; without memory, try again once idle caches are freed, and then no more in this text."""
        for _ in () if self._is_full else range(2):
            try:
                return capture()
            except (RuntimeError, MemoryError, OSError) as error:
                if not is_out_of_memory(error):
                    raise
            release_memory()  # only here: the handled error refers to the memory
        self._is_full = True
        return None

    def positions(self, count: int) -> Tensor:
        """Return the next positions, ``[count]`` int64; computed once per pass for all layers."""
        if count not in self._next_positions:
            self._next_positions[count] = super().positions(count)
        return self._next_positions[count]

    def gather(self, offsets: Sequence[int]) -> None:
        """Compact as :meth:`KVCache.gather` does, with one captured move for each padded number of offsets."""
        width = padded_count(len(offsets))
        identity = list(range(width))
        if list(offsets) == identity[: len(offsets)]:
            return
        fits = self.length + width <= self.max_length
        if fits and width not in self._moves:
            self._moves[width] = self._capture_move(identity)
        move = self._moves[width] if fits else None
        if move is None:
            super().gather(offsets)
            return
        self._on_device()
        with self._static():
            move.replay((copy_to_device([*offsets, *identity[len(offsets) :]], self.device),), self._move)

    def _capture_move(self, identity: Sequence[int]) -> CapturedPass | None:
        try:
            with self._capturing(), self._static():  # moving positions onto themselves is harmless while capturing
                return self._within_memory(lambda: self._capture((copy_to_device(identity, self.device),), self._move))
        except (RuntimeError, MemoryError) as error:
            if _is_device_lost(error):
                raise
            return None

    def _move(self, offsets: Tensor) -> tuple[Tensor, ...]:
        self._next_positions = {}
        destination, source = self.positions(offsets.shape[0]), self._on_device() + offsets
        for stack in self._stacks:
            stack.index_copy_(3, destination, stack.index_select(3, source))
        return ()

    def _capture(self, inputs: Sequence[Tensor], compute: Compute) -> CapturedPass:
        return CapturedPass() if self.device.type != "cuda" else _Graph(self.device, self._pool, inputs, compute)

    @torch.inference_mode()
    def clear(self) -> None:
        """Zero the buffers, as masked positions are read too, and reset what an interrupted user may have left."""
        self.length = 0
        self.static_shapes, self._device_value = False, -1
        if self._is_full:
            self._is_full, self._moves = False, {count: move for count, move in self._moves.items() if move is not None}
        for stack in self._stacks:
            stack.zero_()

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        global _seconds
        with _lock:
            start = now(self.device)
            self._on_device()  # before the capture, so that the update is not captured
            try:
                yield
            finally:
                _seconds += now(self.device) - start

    @contextlib.contextmanager
    def _static(self, kernels: bool = True) -> Iterator[None]:
        """Run passes in static shapes, with the kernel for attention to whole buffers where there is one."""
        self.static_shapes = True
        try:
            with whole_buffers() if kernels else contextlib.nullcontext():
                yield
        finally:
            self.static_shapes = False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Return an error and its contexts; a pass that fails during capture makes the end of the capture fail too."""
    while error is not None:
        yield error
        error = error.__context__


def _is_device_lost(error: BaseException) -> bool:
    """Return whether nothing will run on the device any more."""
    return any(words in str(cause) for cause in _causes(error) for words in _DEVICE_LOST)

"""How does a GPU run a pass without being told every kernel? A pass is recorded once, and replayed from then on.

A small model's pass is a thousand kernels of a few microseconds each, and telling the device of them takes longer than
running them. CUDA graphs (CUDA C++ Programming Guide, "CUDA Graphs") hold them all. They need shapes and addresses that
never change, so recorded passes read a cache's whole buffers under a mask, and :mod:`layerskip.models.cache_pool` keeps the caches.
All else, as a prompt's first pass, reads the part in use and runs as it is.

Not every model can be recorded. One that asks the device for a value, as some mixtures of experts do, is found out in a pass
that forbids it; one that reckons with the shapes of keys, by comparing what the first pass of each shape says. They run as
they are. While a pass is recorded, no other thread may ask a device for anything.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn

from layerskip.device.clock import now
from layerskip.device.memory import out_of_memory
from layerskip.device.tolerance import close
from layerskip.device.upload import upload
from layerskip.models.cache import KVCache
from layerskip.models.cuda_graphs import Anew, Compute, Pass, Recorder

_WIDEST = 64  # tokens of a recorded pass
_STEP = 8  # tokens
_LOST = ("device-side assert", "illegal memory access")  # errors behind which nothing runs on a device any more


def widened(count: int) -> int:
    """As many or a few more tokens, so that few numbers of them are recorded."""
    return -(-count // _STEP) * _STEP


class RecordedCache(KVCache):
    """A cache that remembers the passes which ran on it.

    Args:
        layers: how many decoder layers write to it.
        max_length: positions to allocate.
        device: where.

    Attributes:
        made_for: what it was made for, of which everything recorded holds.
        device: where it is.
    """

    def __init__(self, layers: int, max_length: int, device: torch.device) -> None:
        super().__init__(layers, max_length, static_shapes=True, device=device)
        self.made_for: Hashable = None
        self.static_shapes = False
        self.device = device
        self._places: dict[int, Tensor] = {}  # the next ones, by how many; of one pass
        self._moves: dict[int, Pass] = {}  # by how many
        self._records_moves = True
        self._passes: weakref.WeakKeyDictionary[nn.Module, dict[tuple[object, ...], Pass]] = weakref.WeakKeyDictionary()
        self._recorder = Recorder(device) if device.type == "cuda" else None

    def records(self, model: nn.Module, width: int) -> bool:
        """Whether passes over so many tokens are recorded here, behind what is in the cache."""
        if not 0 < self.length <= self.max_length - width or width > _WIDEST or model in _refused:
            return False
        # What autocast has converted is gone when it ends, and gradients are nobody's who decodes.
        return torch.is_inference_mode_enabled() and not torch.is_autocast_enabled(self.device.type)

    def replay(self, model: nn.Module, kind: Hashable, inputs: Sequence[Tensor], compute: Compute) -> tuple[Tensor, ...]:
        """A pass behind ``length``, which is recorded if it is the first of its shapes and can be.

        Args:
            model: whose pass it is; one that :meth:`records` says passes of.
            kind: what tells it from others of the same shapes.
            inputs: what differs from pass to pass, beside the cache.
            compute: makes the pass of the inputs.

        Returns:
            What ``compute`` returns.
        """

        def afresh(*inputs: Tensor) -> tuple[Tensor, ...]:
            self._places = {}  # else a graph would read those of the pass before
            return compute(*inputs)

        key = kind, *(part.shape for part in inputs)
        passes = self._passes.setdefault(model, {})
        if key not in passes:
            with self._recording():
                made = self._made(model, inputs, afresh)
            if made is None:
                return afresh(*inputs)
            passes[key] = made
        self._on_device()
        with self._static():
            return passes[key].replay(inputs, afresh)

    def _made(self, model: nn.Module, inputs: Sequence[Tensor], compute: Compute) -> Pass | None:
        """A recorded pass that says what an unrecorded one does, or None; the model is refused unless the next may do."""
        expected = compute(*inputs)
        if not all(bool(part.isfinite().all()) for part in expected):
            return None  # nothing is close to it, nor far from it
        try:
            with self._static():
                made = self._make(inputs, compute)
                made.blank()
                found = made.replay(inputs, compute)
            if all(map(close, found, expected)):
                return made
            reason = "recorded, they say something else"
        except (RuntimeError, MemoryError) as error:
            if _is_lost(error):
                raise
            if any(map(out_of_memory, _causes(error))):
                return None
            reason = str(error).partition("\n")[0]
        _refused.add(model)
        _log.warning("%s: its passes cannot be recorded, and run as they are: %s", type(model).__name__, reason)
        return None

    def positions(self, count: int) -> Tensor:
        """The same for all layers of a pass."""
        if count not in self._places:
            self._places[count] = super().positions(count)
        return self._places[count]

    def gather(self, places: Sequence[int]) -> None:
        """In one go; what stays where it is fills the number up to one of few."""
        width = widened(len(places))
        stay = list(range(width))
        if list(places) == stay[: len(places)]:
            return
        move = self._recorded_move(stay) if self.length + width <= self.max_length else None
        if move is None:
            super().gather(places)
            return
        self._on_device()
        with self._static():
            move.replay((upload([*places, *stay[len(places) :]], self.device),), self._move)

    def _recorded_move(self, stay: Sequence[int]) -> Pass | None:
        """One of so many places; None where none could be recorded, now or before."""
        if self._records_moves and len(stay) not in self._moves:
            try:
                with self._recording(), self._static():  # what stays can be moved as often as recording asks for
                    self._moves[len(stay)] = self._make((upload(stay, self.device),), self._move)
            except (RuntimeError, MemoryError) as error:
                if _is_lost(error):
                    raise
                self._records_moves = False
        return self._moves.get(len(stay))

    def _move(self, places: Tensor) -> tuple[Tensor, ...]:
        self._places = {}
        here = self.positions(places.shape[0])
        for states in self.buffers():
            states.index_copy_(2, here, states.index_select(2, self._on_device() + places))
        return ()

    def _make(self, inputs: Sequence[Tensor], compute: Compute) -> Pass:
        return Anew() if self._recorder is None else self._recorder.record(inputs, compute)

    @torch.inference_mode()
    def clear(self) -> None:
        """Be as new, but for what was recorded: no number of an earlier text is left, as masked ones are read, too."""
        self.length = 0
        # Whoever had it may have been interrupted anywhere.
        self.static_shapes, self._told = False, -1
        for states in self.buffers():
            states.zero_()

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        global _seconds
        with _alone:
            start = now(self.device)
            self._on_device()  # else the telling would be recorded
            try:
                yield
            finally:
                _seconds += now(self.device) - start

    @contextlib.contextmanager
    def _static(self) -> Iterator[None]:
        self.static_shapes = True
        try:
            yield
        finally:
            self.static_shapes = False


def _causes(error: BaseException) -> Iterator[BaseException]:
    """It and what led to it: where a pass fails while it is recorded, ending the record fails, too."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__context__


def _is_lost(error: BaseException) -> bool:
    """Whether nothing will run on the device any more, recorded or not."""
    return any(words in str(cause) for cause in _causes(error) for words in _LOST)


def seconds_recording() -> float:
    """What recording has taken in this process, which every user pays once and no measurement of decoding should show."""
    return _seconds


_seconds = 0.0
_alone = threading.RLock()  # no two recordings at once; what forbids waiting forbids it to all threads
_log = logging.getLogger(__name__)
_refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()

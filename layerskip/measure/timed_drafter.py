"""How long do drafts take?"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, Reader, Said
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.verify import Verdict
from layerskip.models.cache import KVCache
from layerskip.models.graph_capture import seconds_recording


class Clocked:
    """A drafter, and how long its drafts take.

    By the device's own clock where it has one: waiting for the device would slow it down. What recording passes takes, once,
    is left out.
    """

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        self.drafter, self.device = drafter, device
        self.tree_tokens = drafter.tree_tokens
        self.modules = drafter.modules if isinstance(drafter, Reader) else ()
        self._readings: list[tuple[Any, Any, float]] = []  # begun, ended, and seconds of recording between
        self._given: tuple[weakref.ref[Any], ...] = ()

    @property
    def given(self) -> list[object]:
        """The target's cache and the chooser that it was last started with, as far as they are still there."""
        return [found for ref in self._given if (found := ref()) is not None]

    @property
    def seconds(self) -> float:
        """What drafting and learning took since the last reset; what starting a prompt takes is part of its prefill."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return sum(max(0.0, float(start.elapsed_time(end)) / 1000 - lost) for start, end, lost in self._readings)
        return sum(float(end - start) - lost for start, end, lost in self._readings)

    def reset(self) -> None:
        """Begin to count anew."""
        self._readings = []

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Begin a prompt."""
        self._given = weakref.ref(cache), weakref.ref(chooser)
        self.drafter.start(prompt, cache, chooser)

    def draft(self, context: Context, limit: int) -> Draft:
        """The drafter's own."""
        with self._timed():
            return self.drafter.draft(context, limit)

    def read(self, features: Tensor) -> None:
        """Pass it on; a drafter that reads nothing is not asked."""
        assert isinstance(self.drafter, Reader)
        self.drafter.read(features)

    def observe(self, verdict: Verdict) -> None:
        """Pass it on."""
        self.drafter.observe(verdict)

    def hear(self, said: Said) -> None:
        """Pass it on."""
        with self._timed():
            self.drafter.hear(said)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        start, before = self._read(), seconds_recording()
        yield
        self._readings.append((start, self._read(), seconds_recording() - before))

    def _read(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

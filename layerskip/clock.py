"""What time is it for a device, and how long do drafts take? The only clock in the library."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .cache import KVCache
from .draft import Draft
from .drafters.base import Context, Drafter, Reader, Said
from .sampling import Chooser
from .verify import Verdict


def now(device: torch.device) -> float:
    """Seconds on the clock once the device has done all that it was asked."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


class Clocked:
    """A drafter, and how long its drafts take.

    By the device's own clock where it has one: waiting for the device would slow it down.
    """

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        self.drafter, self.device = drafter, device
        self.tree_tokens = drafter.tree_tokens
        self.modules = drafter.modules if isinstance(drafter, Reader) else ()
        self._readings: list[tuple[Any, Any]] = []
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
            return sum(float(start.elapsed_time(end)) for start, end in self._readings) / 1000
        return sum(float(end - start) for start, end in self._readings)

    def reset(self) -> None:
        """Begin to count anew."""
        self._readings = []

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Begin a prompt."""
        self._given = weakref.ref(cache), weakref.ref(chooser)
        self.drafter.start(prompt, cache, chooser)

    def draft(self, context: Context, limit: int) -> Draft:
        """The drafter's own."""
        start = self._read()
        draft = self.drafter.draft(context, limit)
        self._readings.append((start, self._read()))
        return draft

    def read(self, features: Tensor) -> None:
        """Pass it on; a drafter that reads nothing is not asked."""
        assert isinstance(self.drafter, Reader)
        self.drafter.read(features)

    def observe(self, verdict: Verdict) -> None:
        """Pass it on."""
        self.drafter.observe(verdict)

    def hear(self, said: Said) -> None:
        """Pass it on."""
        start = self._read()
        self.drafter.hear(said)
        self._readings.append((start, self._read()))

    def _read(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

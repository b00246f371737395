"""A wrapper that measures the time of a drafter."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, FeatureReader, LateRead, PlainDecoding, VerifyOutput
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.verify import Verdict
from layerskip.models.cache import KVCache
from layerskip.models.graph_capture import capture_seconds


class TimedDrafter:
    """A wrapper of a drafter that measures the time spent on drafting and learning.

    The time is taken from the device's own clock if it has one, as waiting for the device would slow it down. The time of
    capturing passes, which happens once, is left out.

    """

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        self.drafter, self.device = drafter, device
        self.tree_tokens = drafter.tree_tokens
        self.modules = drafter.modules if isinstance(drafter, FeatureReader) else ()
        self.never_drafts = isinstance(drafter, PlainDecoding) and drafter.never_drafts
        self._readings: list[tuple[Any, Any, float]] = []  # start, end, and seconds of capturing in between
        self._given: tuple[weakref.ref[Any], ...] = ()

    @property
    def started_with(self) -> list[object]:
        """The target's cache and the chooser of the last start, as far as they still exist."""
        return [value for ref in self._given if (value := ref()) is not None]

    @property
    def seconds(self) -> float:
        """Seconds spent on drafting and learning since the last reset; starting a prompt belongs to its prefill."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return sum(max(0.0, float(start.elapsed_time(end)) / 1000 - lost) for start, end, lost in self._readings)
        return sum(float(end - start) - lost for start, end, lost in self._readings)

    def reset(self) -> None:
        """Set the time to 0."""
        self._readings = []

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Start the drafter."""
        self._given = weakref.ref(cache), weakref.ref(chooser)
        self.drafter.start(prompt, cache, chooser)

    def draft(self, context: Context, limit: int) -> Draft:
        """Return the drafter's draft."""
        with self._timed():
            return self.drafter.draft(context, limit)

    def observe_features(self, features: Tensor) -> None:
        """Pass the hidden states on; only called if the drafter reads some."""
        assert isinstance(self.drafter, FeatureReader)
        self.drafter.observe_features(features)

    def observe(self, verdict: Verdict) -> None:
        """Pass the verdict on."""
        self.drafter.observe(verdict)

    def observe_logits(self, output: VerifyOutput) -> Sequence[LateRead]:
        """Pass the target's output on."""
        with self._timed():
            return [LateRead(late.values, partial(self._receive, late)) for late in self.drafter.observe_logits(output)]

    def _receive(self, late: LateRead, verdict: Verdict, values: list[Any]) -> None:
        with self._timed():
            late.receive(verdict, values)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        start, before = self._read(), capture_seconds()
        yield
        self._readings.append((start, self._read(), capture_seconds() - before))

    def _read(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

"""This library's own decoder as a back end: one request at a time, with every method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from layerskip import SpeculativeConfig, Target
from layerskip.decoding.drafter import drafter_classes
from layerskip.measure.measure import Contender, Decoder, interleave
from layerskip.measure.measurement import Sample
from layerskip.models.environment import machine
from layerskip.models.graph_capture import capture_seconds
from layerskip.models.target import NotFinite
from searches.app.checks import InputError
from searches.backends.backend import BASELINE, Backend, BackendError, Comparison
from searches.results import RESULTS_VERSION
from searches.tracking.names import STARTUP_SECONDS


@dataclass(eq=False)
class LayerskipBackend(Backend):
    """This library's decoding loop, with the loaded model as ``target``."""

    target: Target = field(metadata={"runtime": True})
    name: ClassVar[str] = "layerskip"

    def __post_init__(self) -> None:
        self._compared: Mapping[str, SpeculativeConfig] | None = None
        self._captured = 0.0  # seconds of capturing before these configurations were first compared

    @property
    def exact(self) -> bool:
        return self.target.dtype == "float32"

    def describe(self) -> dict[str, Any]:
        return {"target": self.target.digest, "machine": machine(self.target), "version": RESULTS_VERSION}

    def supports(self, method: str) -> str | None:
        return None if method in drafter_classes() else "layerskip has no drafter of this method"

    def compare(self, asked: Comparison) -> Iterator[dict[str, Sample]]:
        """See :meth:`Backend.compare`; errors are also those of ``build_drafter``, and ``NotFinite`` of plain decoding."""
        if asked.workload.concurrency != 1:
            raise InputError("workload.concurrency: layerskip decodes one request at a time; backend=vllm serves several")
        if self._compared != asked.configs:
            self._compared, self._captured = dict(asked.configs), capture_seconds()
        entries = {BASELINE: SpeculativeConfig(), **asked.configs}
        contenders: dict[str, Contender] = {name: Decoder.of(self.target, config) for name, config in entries.items()}
        conditions = asked.task, asked.repeats, asked.without, asked.before
        return _failing_alone(interleave(self.target, asked.prompts, contenders, *conditions))

    def metrics(self) -> dict[str, float]:
        """Return the seconds of compiling and capturing passes since these configurations were first compared, if any."""
        seconds = 0.0 if self._compared is None else capture_seconds() - self._captured
        return {STARTUP_SECONDS: seconds} if seconds else {}


def _failing_alone(rows: Iterator[dict[str, Sample]]) -> Iterator[dict[str, Sample]]:
    """Yield rows; what a configuration cannot decode, but plain decoding can, becomes a :class:`BackendError`."""
    try:
        yield from rows
    except NotFinite as error:
        if error.contender == BASELINE:
            raise
        raise BackendError(str(error), name=error.contender) from error

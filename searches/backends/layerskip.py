"""This library's own decoder as a back end: one request at a time, with every method."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from layerskip import PromptSet, SpeculativeConfig, Target
from layerskip.decoding.drafter import drafter_classes
from layerskip.measure.measure import Contender, Decoder, Task, interleave
from layerskip.measure.measurement import Sample
from layerskip.models.environment import machine
from layerskip.models.graph_capture import capture_seconds
from layerskip.models.target import NotFinite
from searches.app.checks import InputError
from searches.backends.backend import BASELINE, Backend, BackendError, Workload
from searches.results import RESULTS_VERSION
from searches.tracking.names import STARTUP_SECONDS


@dataclass(frozen=True)
class LayerskipBackend(Backend):
    """This library's decoding loop, with the loaded model as ``target``."""

    target: Target = field(metadata={"runtime": True})
    name: ClassVar[str] = "layerskip"
    _compared: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The configurations of the last comparison, and the seconds of capturing before they were first compared."""

    @property
    def exact(self) -> bool:
        return self.target.dtype == "float32"

    def describe(self) -> dict[str, Any]:
        return {"target": self.target.digest, "machine": machine(self.target), "version": RESULTS_VERSION}

    def supports(self, method: str) -> str | None:
        return None if method in drafter_classes() else "layerskip has no drafter of this method"

    def compare(
        self,
        configs: Mapping[str, SpeculativeConfig],
        prompts: PromptSet,
        task: Task,
        workload: Workload = Workload(),
        repeats: int = 1,
        without: Collection[str] = (),
        before: PromptSet | None = None,
    ) -> Iterator[dict[str, Sample]]:
        """See :meth:`Backend.compare`. Each prompt has its own random order.

        Errors are also those of :func:`~layerskip.build_drafter`, and :class:`NotFinite` of plain decoding.
        """
        if workload.concurrency != 1:
            raise InputError("workload.concurrency: layerskip decodes one request at a time; backend=vllm serves several")
        if self._compared.get("configs") != configs:
            self._compared.update(configs=dict(configs), before=capture_seconds())
        entries = {BASELINE: SpeculativeConfig(), **configs}
        contenders: dict[str, Contender] = {name: Decoder.of(self.target, config) for name, config in entries.items()}
        return _failing_alone(interleave(self.target, prompts, contenders, task, repeats, without, before))

    def metrics(self) -> dict[str, float]:
        """Return the seconds of compiling and capturing passes since these configurations were first compared, if any."""
        seconds = capture_seconds() - self._compared.get("before", capture_seconds())
        return {STARTUP_SECONDS: seconds} if seconds else {}

    def close(self) -> None:
        """Nothing was started."""


def _failing_alone(rows: Iterator[dict[str, Sample]]) -> Iterator[dict[str, Sample]]:
    """Yield rows; what a configuration cannot decode, but plain decoding can, becomes a :class:`BackendError`."""
    try:
        yield from rows
    except NotFinite as error:
        if error.contender == BASELINE:
            raise
        raise BackendError(str(error), name=error.contender) from error

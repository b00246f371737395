"""An engine of :mod:`searches.engines.adapters` as the one that a study measures, one request at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from layerskip import SpeculativeConfig, UnsupportedModel
from layerskip.measure.losslessness import Losslessness
from layerskip.measure.measure import Task
from layerskip.models.loading import DTYPES
from searches.app.checks import InputError
from searches.backends.backend import BackendError
from searches.backends.client import Client, Completion, RequestFailed
from searches.backends.running_engine import Answer, RunningEngine
from searches.backends.served import ServedBackend
from searches.engines.peer import METHODS, EnginePeer, asked_dtype, check_on_cpu, engine_version, installed
from searches.space.search_space import SearchSpace


@dataclass(eq=False)
class EngineBackend(ServedBackend):
    """A back end that measures an engine of ``make engines``, each configuration in a process of its own.

    Args:
        engine: its name, such as ``openvino_genai``.
        cache_folder: where models are saved as the engine loads them.
    """

    name: ClassVar[str] = "engine"
    takes_schedules: ClassVar[bool] = False
    engine: str | None = None
    cache_folder: str = "outputs/engines"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule:
            raise InputError("backend.schedule: has no effect on backend=engine")
        self.engine = installed("backend.engine", self.engine)
        check_on_cpu(self.target)
        self._version = engine_version(self.engine)
        self._rounds_to = DTYPES[self.target.dtype]

    def describe(self) -> dict[str, Any]:
        return {"engine": self.engine, "engine_version": self._version} | super().describe()

    def supports(self, method: str) -> str | None:
        return None if method in ("none", *METHODS) else f"{self.engine} has no counterpart of {method}"

    def restrict(self, space: SearchSpace) -> SearchSpace:
        """Return the space as for servers; the shortest n-gram is one token."""
        return super().restrict(space).narrowed(prompt_lookup_min=(1, 1))

    def _start(self, config: SpeculativeConfig) -> RunningEngine:
        settings: dict[str, Any] = {"method": "plain" if config.method == "none" else config.method}
        settings |= {"start_seconds": self.start_seconds, "limit_seconds": self.limit_seconds}
        if config.method != "none":
            names = ("num_speculative_tokens", "prompt_lookup_max", "draft_model")
            settings |= {name: getattr(config, name) for name in names}
        start = time.monotonic()
        try:
            peer = EnginePeer(
                self.target, Path(self.cache_folder), str(self.engine), dtype=asked_dtype(self.target), **settings
            )
        except UnsupportedModel as error:
            raise BackendError(str(error)) from None
        self._rounds_to = peer.rounds_to
        return RunningEngine(peer.process, cast(Client, _PeerClient(peer)), time.monotonic() - start)

    def _compared(self, prompt_id: str, expected: Answer, actual: Answer, task: Task) -> Losslessness:
        return super()._compared(prompt_id, expected, actual, task).judged_in(self._rounds_to)


@dataclass(frozen=True)
class _PeerClient:
    """An engine behind the interface of a server's client."""

    peer: EnginePeer

    def complete_all(self, prompts: Sequence[Sequence[int]], tasks: Sequence[Task], concurrency: int) -> list[Completion]:
        """Decode prompts one after the other."""
        if concurrency != 1:
            raise InputError(
                "workload.concurrency: backend=engine decodes one request at a time; backend=vllm serves several"
            )
        try:
            return [self._complete(prompt, task) for prompt, task in zip(prompts, tasks, strict=True)]
        except UnsupportedModel as error:
            raise RequestFailed(str(error)) from None

    def get(self, path: str) -> str:
        """No engine publishes counters here; rounds follow from the pieces of answers."""
        raise RequestFailed(f"there is no {path}")

    def _complete(self, prompt: Sequence[int], task: Task) -> Completion:
        known: list[tuple[float, int]] = []
        start = time.perf_counter()
        result = self.peer(prompt, task, lambda count: known.append((time.perf_counter(), count)))
        end = time.perf_counter()
        (first, count), sizes = known[0], (each.committed for each in result.stats.rounds)
        text = self.peer.target.decode(result.tokens)
        return Completion(text, tuple(result.tokens), (count, *sizes), first - start, end - first)

"""An engine of the tests: it decodes like this library, with seconds that are given, and fails where it is told to."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from layerskip import PromptSet, SpeculativeConfig, Target
from layerskip.measure.measure import Task
from layerskip.measure.measurement import Sample
from searches.backends.backend import BASELINE, Backend, BackendError, Workload
from searches.backends.layerskip import LayerskipBackend
from searches.space.search_space import SearchSpace

BROKEN = 5  # the length of drafts with which the engine stops
SPEEDUP = 1.05  # so little that any number of tokens per round allows it
LOG = "\n".join(f"line {number}" for number in range(50))


@dataclass
class FakeBackend(Backend):
    """Plain decoding takes a second a token, drafts are a little faster; each engine is a process that does nothing.

    Args:
        target: decodes.
        version: shown in descriptions.
    """

    target: Target = field(metadata={"runtime": True})
    version: int = 1
    name: ClassVar[str] = "fake"
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict, init=False, repr=False)

    @property
    def exact(self) -> bool:
        return False

    def describe(self) -> dict[str, Any]:
        return {"engine": {"name": "fake", "version": self.version}, "target": self.target.digest}

    def supports(self, method: str) -> str | None:
        return None if method in ("none", "prompt_lookup") else "the fake engine copies only"

    def restrict(self, space: SearchSpace) -> SearchSpace:
        return space.narrowed(match=("first",))

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
        for name, config in {BASELINE: SpeculativeConfig(), **configs}.items():
            if config.num_speculative_tokens == BROKEN:
                raise BackendError("the engine stopped\nat once", LOG, name)
            if name not in self.running:  # `cat` ends with the tests, too
                self.running[name] = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        own = LayerskipBackend(self.target)
        for row in own.compare(configs, prompts, task, Workload(), repeats, without, before):
            varied = SPEEDUP + sum(map(ord, row[BASELINE].prompt_id)) % 3 / 100  # so that intervals have a width
            speeds = {name: 1.0 if name == BASELINE else varied for name in row}
            yield {
                name: replace(sample, prefill_seconds=1.0, decode_seconds=sample.decoded_tokens / speeds[name])
                for name, sample in row.items()
            }

    def metrics(self) -> dict[str, float]:
        return {"startup_seconds": 2.0, "throughput": 3.0, "tpot_p50": 0.5, "ttft_p50": 1.0}

    def close(self) -> None:
        while self.running:
            process = self.running.popitem()[1]
            process.communicate()

"""The interface between the decisions of a search and its measurements.

A search sees samples, paired prompt by prompt with plain decoding. They come from a back end that runs a model, or from a
simulated decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Protocol

from layerskip import PromptSet, Sampling, SpeculativeConfig
from layerskip.measure.measure import Task
from layerskip.measure.measurement import Sample
from searches.backends.backend import BASELINE, Backend, BackendError, Row, Workload
from searches.results import ResultLog

__all__ = ["BASELINE", "Bench", "ModelBench", "Row", "logged_row", "logged_seconds", "resumed_rows", "surviving_rows"]


class Bench(Protocol):
    """Measurement of configurations side by side."""

    @property
    def exact(self) -> bool:
        """True if outputs must equal plain decoding's token for token, as in float32."""

    @property
    def conditions(self) -> Any:
        """Everything that samples depend on, except configurations, prompts and seed, as plain values."""

    def compare(
        self,
        configs: Mapping[str, SpeculativeConfig],
        prompts: PromptSet,
        repeats: int,
        seed: int,
        without: Collection[str] = (),
        before: PromptSet | None = None,
    ) -> Iterator[dict[str, Sample]]:
        """Measure configurations and plain decoding, interleaved; yield after each prompt one sample per name.

        Args:
            configs: by name; the name ``baseline`` is plain decoding's.
            prompts: at least one.
            repeats: how often every prompt is decoded.
            seed: of the sampled tokens and of the order of configurations.
            without: configurations that are no longer measured; it may grow from prompt to prompt.
            before: prompts that are decoded first, unmeasured, by drafters that learn from prompt to prompt.
        """

    def metrics(self) -> Mapping[str, float]:
        """Return what the back end reports of the last comparison beside its samples."""
        return {}


@dataclass(frozen=True)
class ModelBench:
    """Bench of a real model, which a back end runs with a sampling and a number of new tokens per prompt and turn."""

    backend: Backend
    sampling: Sampling
    max_new_tokens: int
    workload: Workload = Workload()

    @property
    def exact(self) -> bool:
        """True if outputs must equal plain decoding's token for token."""
        return self.backend.exact

    @property
    def conditions(self) -> Any:
        """The back end's description, the sampling, the number of tokens and the load."""
        return [self.backend.describe(), self.sampling.to_dict(), self.max_new_tokens, self.workload.to_dict()]

    def compare(
        self,
        configs: Mapping[str, SpeculativeConfig],
        prompts: PromptSet,
        repeats: int,
        seed: int,
        without: Collection[str] = (),
        before: PromptSet | None = None,
    ) -> Iterator[dict[str, Sample]]:
        """Decode with each configuration; see :meth:`Bench.compare`.

        Raises:
            BackendError: see :meth:`~searches.backends.backend.Backend.compare`.
        """
        task = Task(self.sampling, self.max_new_tokens, seed)
        rows = self.backend.compare(configs, prompts, task, self.workload, repeats, without, before)
        return rows if self.workload.goal == "decoding" else map(_whole_requests, rows)

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of :meth:`~searches.backends.backend.Backend.metrics`."""
        return self.backend.metrics()


def _whole_requests(row: Row) -> dict[str, Sample]:
    """Return samples whose decoding is the whole request.

    With a constant number of requests in flight, the engine's throughput is that number times the tokens of a request over
    its seconds (Little's law), so that the ratio of these rates is the ratio of throughputs. A sample whose outputs all
    end with their first token has no rate.
    """
    return {
        name: replace(
            sample,
            decoded_tokens=sample.tokens if sample.tokens > max(1, len(sample.requests)) else 0,
            decode_seconds=sample.prefill_seconds + sample.decode_seconds,
        )
        for name, sample in row.items()
    }


def resumed_rows(
    measure: Callable[..., Iterator[Row]], prompts: PromptSet, log: ResultLog, prefix: str, before: PromptSet | None = None
) -> Iterator[Row]:
    """Yield one row per prompt, in order; only rows that are not in the log are measured, and added to it.

    Drafters that learn from prompt to prompt decode the logged prompts first, unmeasured.

    Args:
        measure: called as ``measure(prompts, before=prompts)``, returns the rows of the first prompts.
        prompts: each is decoded once.
        log: rows of an interrupted run.
        prefix: distinguishes these rows in the log from others of the same prompts.
        before: prompts that drafters which learn decode before the logged ones.
    """
    known, missing = (
        PromptSet(tuple(item for item in prompts if (f"{prefix} {item.id}" in log) is logged)) for logged in (True, False)
    )
    measured = measure(missing, before=PromptSet((*(before or ()), *known))) if len(missing) else iter(())
    for item in prompts:
        yield logged_row(measured, log, f"{prefix} {item.id}")


def surviving_rows(
    bench: Bench,
    configs: Mapping[str, SpeculativeConfig],
    prompts: PromptSet,
    seed: int,
    without: Collection[str],
    before: PromptSet,
) -> Iterator[dict[str, Sample]]:
    """Yield the rows of :meth:`Bench.compare`; when a configuration fails, continue without it from the same prompt.

    Raises:
        BackendError: plain decoding fails.
    """
    done = 0
    while done < len(prompts):
        try:
            for row in bench.compare(configs, PromptSet(prompts.items[done:]), 1, seed, without, before):
                done += 1
                yield row
        except BackendError as error:
            if error.name not in configs:
                raise
            print(f"left out: {configs[error.name].label()}: {error.reason}", flush=True)
            configs = {name: config for name, config in configs.items() if name != error.name}


def logged_row(measured: Iterator[Row], log: ResultLog, name: str) -> Row:
    """Return the row of a name from the log; if it is missing, take the next measured row and log it."""
    if name not in log:
        start = monotonic()
        samples = {contender: sample.to_dict() for contender, sample in next(measured).items()}
        log.add(name, {"samples": samples, "seconds": monotonic() - start})
    return {contender: Sample.from_dict(fields) for contender, fields in log[name]["samples"].items()}


def logged_seconds(log: ResultLog) -> float:
    """Return the seconds that measuring the rows of a log took, including the check of their outputs."""
    return sum(float(log[name]["seconds"]) for name in log)

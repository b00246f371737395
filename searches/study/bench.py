"""The interface between a search and the decoder that it measures.

A search sees samples, paired prompt by prompt with plain decoding. They come from a model, or from a simulated decoder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from layerskip import PromptSet, Sampling, SpeculativeConfig, Target
from layerskip.files import digest
from layerskip.measure.measure import Contender, Decoder, Task, interleave
from layerskip.measure.measurement import Sample
from layerskip.models.environment import machine
from searches.app.record_header import program_sources
from searches.app.resume_log import ResultLog

BASELINE = "baseline"

Row = Mapping[str, Sample]


class Bench(Protocol):
    """Measurement of configurations side by side."""

    @property
    def layers(self) -> int:
        """Number of decoder layers of the target."""

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
        """Measure configurations and plain decoding, interleaved.

        Args:
            configs: by name; none of them is called ``baseline``.
            prompts: at least one.
            repeats: how often every prompt is decoded.
            seed: of the sampled tokens and of the order of configurations.
            without: configurations that are no longer measured; it may grow from prompt to prompt.
            before: prompts that are decoded first, unmeasured, by drafters that learn from prompt to prompt.

        Yields:
            After each prompt one sample per name, ``baseline`` included.
        """


@dataclass(frozen=True)
class ModelBench:
    """Bench of a real model; ``max_new_tokens`` is per prompt and turn."""

    target: Target
    sampling: Sampling
    max_new_tokens: int

    @property
    def layers(self) -> int:
        """Number of decoder layers of the target."""
        return self.target.layers

    @property
    def exact(self) -> bool:
        """True if the target computes in float32."""
        return self.target.dtype == "float32"

    @property
    def conditions(self) -> Any:
        """The target, the sampling, the machine and the source code of this program."""
        decoding = self.sampling.to_dict(), self.max_new_tokens
        return [self.target.digest, *decoding, machine(self.target), digest(program_sources())]

    def compare(
        self,
        configs: Mapping[str, SpeculativeConfig],
        prompts: PromptSet,
        repeats: int,
        seed: int,
        without: Collection[str] = (),
        before: PromptSet | None = None,
    ) -> Iterator[dict[str, Sample]]:
        """Decode with each configuration, in a random order for each prompt.

        The arguments are those of :meth:`Bench.compare`, the errors those of :func:`~layerskip.build_drafter`.
        """
        entries = {BASELINE: SpeculativeConfig(), **configs}
        contenders: dict[str, Contender] = {name: Decoder.of(self.target, config) for name, config in entries.items()}
        task = Task(self.sampling, self.max_new_tokens, seed)
        return interleave(self.target, prompts, contenders, task, repeats, without, before)


def resumed_rows(
    bench: Bench,
    configs: Mapping[str, SpeculativeConfig],
    prompts: PromptSet,
    seed: int,
    log: ResultLog,
    prefix: str,
    without: Collection[str] = (),
) -> Iterator[Row]:
    """Yield one row per prompt, in order; only rows that are not in the log are measured.

    Drafters that learn from prompt to prompt decode the logged prompts first, unmeasured.

    Args:
        bench: measures the missing rows.
        configs: by name, as for :meth:`Bench.compare`.
        prompts: each is decoded once.
        seed: as for :meth:`Bench.compare`.
        log: rows of an interrupted run; takes the new ones.
        prefix: distinguishes these rows in the log from others of the same prompts.
        without: as for :meth:`Bench.compare`.
    """
    known, missing = (
        PromptSet(tuple(item for item in prompts if (f"{prefix} {item.id}" in log) is logged)) for logged in (True, False)
    )
    measured: Iterator[Row] = bench.compare(configs, missing, 1, seed, without, known) if len(missing) else iter(())
    for item in prompts:
        yield logged_row(measured, log, f"{prefix} {item.id}")


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

"""What is a configuration measured on? The seam between a search and the machine that decodes.

A search sees samples, paired prompt by prompt with plain decoding; where they come from is the bench's own business.
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
    """Measures configurations side by side."""

    @property
    def layers(self) -> int:
        """How many decoder layers there are to skip."""
        ...

    @property
    def exact(self) -> bool:
        """Whether outputs have to be equal token for token, as in float32."""
        ...

    @property
    def conditions(self) -> Any:
        """What decides the samples beside configurations, prompts and seed, as plain values."""
        ...

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
            seed: of orders and draws.
            without: configurations that are measured no more; it may grow from prompt to prompt.
            before: prompts that whoever learns from one for the next decodes first, unmeasured.

        Yields:
            After every prompt one sample per name, ``baseline`` among them.
        """
        ...


@dataclass(frozen=True)
class ModelBench:
    """The real decoder on a real model.

    Args:
        target: the model.
        sampling: how tokens are chosen.
        max_new_tokens: per prompt and turn.
    """

    target: Target
    sampling: Sampling
    max_new_tokens: int

    @property
    def layers(self) -> int:
        """The target's."""
        return self.target.layers

    @property
    def exact(self) -> bool:
        """In float32."""
        return self.target.dtype == "float32"

    @property
    def conditions(self) -> Any:
        """The target, how it is decoded, the machine and this program."""
        how = self.sampling.to_dict(), self.max_new_tokens
        return [self.target.digest, *how, machine(self.target), digest(program_sources())]

    def compare(
        self,
        configs: Mapping[str, SpeculativeConfig],
        prompts: PromptSet,
        repeats: int,
        seed: int,
        without: Collection[str] = (),
        before: PromptSet | None = None,
    ) -> Iterator[dict[str, Sample]]:
        """Decode with each, in an order drawn anew for every prompt; raises as :func:`build_drafter`."""
        entries = {BASELINE: SpeculativeConfig(), **configs}
        contenders: dict[str, Contender] = {name: Decoder.of(self.target, config) for name, config in entries.items()}
        task = Task(self.sampling, self.max_new_tokens, seed)
        return interleave(self.target, prompts, contenders, task, repeats, without, before)


def go_on(
    bench: Bench,
    configs: Mapping[str, SpeculativeConfig],
    prompts: PromptSet,
    seed: int,
    kept: ResultLog,
    about: str,
    without: Collection[str] = (),
) -> Iterator[Row]:
    """Rows of prompts, in order; only what is not kept is measured, and whoever learns has learnt from the others by then.

    Args:
        bench: what they are measured on.
        configs: by name, as of :meth:`Bench.compare`.
        prompts: each is decoded once.
        seed: of orders and draws.
        kept: rows of a run that was interrupted; takes those that are measured now.
        about: what tells these rows from other ones of the same prompts that are kept.
        without: configurations that are measured no more; it may grow from prompt to prompt.
    """
    known, missing = (
        PromptSet(tuple(item for item in prompts if (f"{about} {item.id}" in kept) is there)) for there in (True, False)
    )
    measured: Iterator[Row] = bench.compare(configs, missing, 1, seed, without, known) if len(missing) else iter(())
    for item in prompts:
        yield kept_row(measured, kept, f"{about} {item.id}")


def kept_row(measured: Iterator[Row], kept: ResultLog, name: str) -> Row:
    """The row of a name; unless it is kept, it is the next one that is measured."""
    if name not in kept:
        start = monotonic()
        samples = {who: sample.to_dict() for who, sample in next(measured).items()}
        kept.add(name, {"samples": samples, "seconds": monotonic() - start})
    return {who: Sample.from_dict(fields) for who, fields in kept[name]["samples"].items()}


def seconds_of(kept: ResultLog) -> float:
    """What the rows took that are kept, checking their outputs included."""
    return sum(float(kept[name]["seconds"]) for name in kept)

"""The interface between a search and the engine that decodes: this library's own decoder, vLLM or a server.

To add one, write a dataclass that extends :class:`Backend`. Its first field is ``target``, with the metadata ``runtime``,
since no configuration sets it; the others are settings with defaults. A file of ``conf/backend/`` with the back end's name
names the class. Its tests inherit those of ``tests/searches/backends/contract.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from layerskip import PromptSet, SpeculativeConfig
from layerskip.measure.measure import Task
from layerskip.measure.measurement import Sample
from searches.app.checks import InputError, check_list, check_whole
from searches.space.search_space import SearchSpace

BASELINE = "baseline"
"""The name of plain decoding in every row."""
CANDIDATE = "candidate"
LOG_LINES = 20  # of an engine's log, which a failed trial keeps

Row = Mapping[str, Sample]
"""The samples of one prompt by name, those of plain decoding as ``baseline``."""


class BackendError(InputError):
    """A configuration that the engine could not run. The trial fails with the reason, in one line, and the study goes on.

    ``log_tail`` are the last lines of the engine's log. ``name`` is the configuration's; empty if plain decoding or unknown.
    """

    def __init__(self, reason: str, log_tail: str = "", name: str = "") -> None:
        self.reason, self.name = " ".join(reason.split()), name
        super().__init__(f"backend: {self.reason}")
        self.log_tail = "\n".join(log_tail.splitlines()[-LOG_LINES:])


@dataclass(frozen=True)
class Workload:
    """The requests that an engine serves while it is measured.

    Args:
        concurrency: number of requests in flight, at least 1. The next one is sent as soon as one is finished.
        goal: what a speedup compares: ``decoding`` or ``throughput``. The first is the tokens per second of a request after
            its first token, the second those of the engine, prefill included.
    """

    concurrency: int = 1
    goal: str = "decoding"

    def __post_init__(self) -> None:
        check_whole("workload.concurrency", self.concurrency)
        check_list("workload.goal", [self.goal], ("decoding", "throughput"))


@dataclass(frozen=True)
class Comparison:
    """What is to be measured: configurations and plain decoding on the same prompts, close to each other in time."""

    configs: Mapping[str, SpeculativeConfig]  # by name; none of them is called ``baseline``
    prompts: PromptSet  # at least one
    task: Task  # how tokens are chosen, how many per prompt and turn, and the seed of the draws and the order
    workload: Workload = Workload()  # requests in flight
    repeats: int = 1  # how often every prompt is decoded
    without: Collection[str] = ()  # names that are no longer measured; it may grow from prompt to prompt
    before: PromptSet | None = None  # prompts decoded first, unmeasured, by drafters that learn from prompt to prompt


class Backend(Protocol):
    """An engine that decodes prompts with and without drafting."""

    name: ClassVar[str]
    """That of its file in ``conf/backend/``; exports store it."""

    @property
    def exact(self) -> bool:
        """True if greedy outputs must equal plain decoding's token for token, as in float32 with one request at a time."""

    def describe(self) -> dict[str, Any]:
        """Return everything that samples depend on, except what a :class:`Comparison` holds, as plain values.

        They are the same from run to run, as rows of an interrupted one are used only under the same description.
        """

    def supports(self, method: str) -> str | None:
        """Return None if the engine drafts with a method, else the reason in one line. ``none`` is supported."""

    def restrict(self, space: SearchSpace) -> SearchSpace:
        """Return a space of supported methods without choices that make no difference to this engine."""
        return space

    def compare(self, asked: Comparison) -> Iterator[dict[str, Sample]]:
        """Yield for each prompt, in order, one sample per name, ``baseline`` included; all at the end if engines take turns.

        Their ``lossless`` compares them with the baseline's output. A caller may stop early, which closes the generator. A
        trial compares its configuration several times, so an engine may stay started until another one is compared.

        Raises:
            BackendError: the engine cannot run one of the configurations, or stopped.
        """

    def metrics(self) -> dict[str, float]:
        """Return what samples do not hold of the last comparison: start-up seconds, also as ``baseline_startup_seconds``."""
        return {}

    def close(self) -> None:
        """Stop everything that this back end started. It may be called twice, and after a failure."""
        return

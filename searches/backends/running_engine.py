"""A server that answers prompts with one configuration, with the rounds that each answer took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from layerskip import SpeculativeConfig
from layerskip.decoding.stats import DecodeStats, Round
from layerskip.measure.measure import Task
from layerskip.measure.measurement import Request, Sample
from layerskip.prompts import PromptItem
from searches.backends.backend import BackendError
from searches.backends.client import Client, Completion, RequestFailed
from searches.backends.engine_counters import Counters, spread
from searches.backends.engine_process import EngineProcess, free_port, held_port

_PORT_TAKEN = "ddress already in use"  # of Python and of other languages


@dataclass(frozen=True)
class Answer:
    """What a server answered to a prompt.

    Args:
        prompt: token ids.
        completion: the answer.
        stats: the rounds.
        concurrency: requests in flight.
    """

    prompt: Sequence[int]
    completion: Completion
    stats: DecodeStats
    concurrency: int = 1

    def at_pace(self, factor: float) -> Answer:
        """Return the answer with its seconds of decoding multiplied, to state them at another speed of the machine."""
        seconds = self.completion.decode_seconds * factor
        return replace(self, completion=replace(self.completion, decode_seconds=seconds))

    def sample(self, item: PromptItem) -> Sample:
        """Return the answer as a sample without a comparison."""
        found = self.completion
        request = Request(self.concurrency, found.count, found.decoded, found.first_seconds, found.decode_seconds)
        return Sample(
            prompt_id=item.id,
            category=item.category,
            tokens=found.count,
            decoded_tokens=found.decoded,
            prefill_seconds=found.first_seconds,
            decode_seconds=found.decode_seconds,
            peak_memory_bytes=0,  # the engine's memory is not this process's
            stats=self.stats,
            requests=(request,),
        )


class RunningEngine:
    """A server, started here or by the user.

    Args:
        name: of the engine, for errors.
        client: of the server.
        process: the engine's process; None if the user started it.
        startup_seconds: until it was ready; 0.0 if the user started it.
    """

    def __init__(
        self, name: str, client: Client, process: EngineProcess | None = None, startup_seconds: float = 0.0
    ) -> None:
        self.name, self.client, self.process, self.startup_seconds = name, client, process, startup_seconds

    @classmethod
    def started(
        cls,
        name: str,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        connect: Callable[[str], Client],
        start_seconds: float,
    ) -> RunningEngine:
        """Return a server that was started on this machine, once it is ready.

        Args:
            name: of the engine, for errors.
            command: starts a server on a port.
            environment: of the server.
            connect: returns a client of a URL.
            start_seconds: until it is ready.

        Raises:
            BackendError: it does not start.
        """

        def start(port: int) -> RunningEngine:
            process = EngineProcess(command(port), environment, name)
            client = connect(f"http://127.0.0.1:{port}")
            return cls(name, client, process, process.wait_until(client.ready, start_seconds))

        with held_port() as port:
            try:
                return start(port)
            except BackendError as error:
                if _PORT_TAKEN not in f"{error} {error.log_tail}":
                    raise
        return start(free_port())  # this server, such as TensorRT-LLM's, shares its port with no socket

    @property
    def running(self) -> bool:
        """False if its process has ended."""
        return self.process is None or self.process.running

    def stop(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            self.process.stop()

    def answer(
        self, prompts: Sequence[Sequence[int]], tasks: Sequence[Task], concurrency: int, config: SpeculativeConfig
    ) -> tuple[list[Answer], float]:
        """Return the answers to prompts and the seconds that all of them took.

        Args:
            prompts: token ids.
            tasks: one for each prompt.
            concurrency: requests in flight.
            config: that the engine decodes with.

        Raises:
            BackendError: the engine ended, or a request failed.
        """
        try:
            before = self._counters(config)
            start = time.perf_counter()
            completions = self.client.complete_all(prompts, tasks, concurrency)
            seconds = time.perf_counter() - start
            after = self._counters(config)
        except RequestFailed as failure:
            if self.process is None:
                raise BackendError(f"{self.name}: {failure}") from None
            raise self.process.error(str(failure)) from None
        if before is None or after is None:
            stats = [_observed_rounds(completion, config) for completion in completions]
        else:
            decoded = [completion.decoded for completion in completions]
            stats = spread(after.since(before).rounds(sum(decoded)), decoded)
        return [Answer(*parts, concurrency) for parts in zip(prompts, completions, stats, strict=True)], seconds

    def _counters(self, config: SpeculativeConfig) -> Counters | None:
        """Return the counts of drafts so far; None if the server publishes none."""
        if config.kind == "none":
            return None
        try:
            return Counters.parse(self.client.get("/metrics"))
        except RequestFailed:
            return None


def _observed_rounds(completion: Completion, config: SpeculativeConfig) -> DecodeStats:
    """Return the rounds that the pieces of an answer show: a server that does not count sends a piece for each step.

    A draft is taken to be as long as the configuration allows.
    """
    if config.kind == "none":
        return DecodeStats((Round(0, 0, 1),) * completion.decoded)
    sizes = [size for size in completion.piece_sizes[1:] if size]
    return DecodeStats(tuple(Round(max(config.draft_length, size - 1), size - 1, size) for size in sizes))

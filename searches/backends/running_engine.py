"""A server that answers prompts with one configuration, with the rounds that each answer took, and its metrics.

Rounds follow from the counters that vLLM 0.32 publishes under ``/metrics`` (``vllm/v1/spec_decode/metrics.py``), and
llama.cpp under the same names. They do not count a step in which a request has no draft; such steps follow from the number
of tokens.

Metrics: ``throughput`` is in tokens per second over all requests, ``ttft`` the seconds to the first token, ``tpot`` the
seconds per token after it, at the median and the 95th percentile.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from layerskip import SpeculativeConfig
from layerskip.decoding.stats import DecodeStats, Round
from layerskip.measure.measure import Task
from layerskip.measure.measurement import Measurement, Request, Sample
from layerskip.prompts import PromptItem
from searches.backends.backend import BASELINE
from searches.backends.client import Client, Completion, RequestFailed
from searches.backends.engine_process import EngineProcess

_LINE = re.compile(
    r"^(?:vllm|llamacpp):spec_decode_num_(drafts|draft_tokens|accepted_tokens_per_pos)_total"
    r'(?:\{(?:.*position="(\d+)")?.*\})? ([\d.e+]+)',
    re.MULTILINE,
)


@dataclass(frozen=True)
class Counters:
    """Counts since an engine started: rounds with a draft, and drafted tokens.

    Entry i of ``by_position`` counts the rounds that accepted more than i tokens.
    """

    drafts: int = 0
    drafted: int = 0
    by_position: tuple[int, ...] = ()

    @classmethod
    def parse(cls, page: str) -> Counters | None:
        """Read a page in Prometheus' text format; None if it has no such counters, as those of other engines.

        Counters of several engines behind one server are added up.
        """
        lines, totals = _LINE.findall(page), Counter[str]()
        for name, position, value in lines:
            totals[position or name] += int(float(value))
        places = 1 + max((int(position) for _, position, _ in lines if position), default=-1)
        by_position = tuple(totals[str(place)] for place in range(places))
        return cls(totals["drafts"], totals["draft_tokens"], by_position) if lines else None

    def since(self, before: Counters) -> Counters:
        """Return the counts after an earlier reading."""
        pairs = itertools.zip_longest(self.by_position, before.by_position, fillvalue=0)
        by_position = tuple(now - then for now, then in pairs)
        return Counters(self.drafts - before.drafts, self.drafted - before.drafted, by_position)

    @property
    def accepted(self) -> int:
        """The number of accepted tokens."""
        return sum(self.by_position)

    def rounds(self, decoded: int) -> list[Round]:
        """Return rounds that gave ``decoded`` tokens: accepted ones as counted, drafts as equally long as they can be.

        Tokens beyond the counted rounds were decoded one by one. A last round may have accepted more than was asked for, and
        the surplus is taken from the longest ones.
        """
        reached = (self.drafts, *self.by_position, 0)
        lengths = enumerate(itertools.pairwise(reached))
        accepted = [length for length, (at_least, more) in lengths for _ in range(at_least - more)][::-1]
        drafted, surplus = self.drafted, max(0, sum(accepted) + len(accepted) - decoded)
        rounds = []
        for place, length in enumerate(accepted):  # the longest first, so that the drafts behind it share what is left
            size, cut = max(length, drafted // (len(accepted) - place)), min(surplus, length)
            drafted, surplus = drafted - size, surplus - cut
            rounds.append(Round(size, length, length + 1 - cut))
        plain = decoded - sum(each.committed for each in rounds)
        return rounds + [Round(0, 0, 1)] * max(0, plain)


def spread(rounds: Sequence[Round], decoded: Sequence[int]) -> list[DecodeStats]:
    """Deal the rounds of several requests to them, in proportion to their decoded tokens.

    Counters do not tell requests that are served together apart, so only the sum over them is measured.
    """
    mixed = random.Random(0).sample(list(rounds), len(rounds))  # else the first requests would get all accepted drafts
    total = sum(decoded)
    places = [round(len(mixed) * so_far / total) if total else 0 for so_far in itertools.accumulate(decoded, initial=0)]
    return [DecodeStats(tuple(mixed[low:high])) for low, high in itertools.pairwise(places)]


@dataclass(frozen=True)
class Answer:
    """What a server answered to a prompt of token ids, in these rounds, with so many requests in flight."""

    prompt: Sequence[int]
    completion: Completion
    stats: DecodeStats
    concurrency: int = 1

    def at_pace(self, factor: float) -> Answer:
        """Return the answer with its seconds of decoding multiplied, to state them at another speed of the machine."""
        return replace(self, completion=replace(self.completion, decode_seconds=self.completion.decode_seconds * factor))

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


@dataclass(frozen=True)
class RunningEngine:
    """A server that was started on this machine and is ready."""

    process: EngineProcess
    client: Client
    startup_seconds: float

    def answer(
        self, prompts: Sequence[Sequence[int]], tasks: Sequence[Task], concurrency: int, config: SpeculativeConfig
    ) -> list[Answer]:
        """Return the answers of an engine of this configuration, or raise a :class:`BackendError`."""
        try:
            before = self._counters(config)
            completions = self.client.complete_all(prompts, tasks, concurrency)
            after = self._counters(config)
        except RequestFailed as failure:
            raise self.process.error(str(failure)) from None
        if before is None or after is None:
            stats = [_observed_rounds(completion, config) for completion in completions]
        else:
            decoded = [completion.decoded for completion in completions]
            stats = spread(after.since(before).rounds(sum(decoded)), decoded)
        return [Answer(*parts, concurrency) for parts in zip(prompts, completions, stats, strict=True)]

    def _counters(self, config: SpeculativeConfig) -> Counters | None:
        """Return the counts of drafts so far; None if the server publishes none."""
        if config.method == "none":
            return None
        try:
            return Counters.parse(self.client.get("/metrics"))
        except RequestFailed:
            return None


def _observed_rounds(completion: Completion, config: SpeculativeConfig) -> DecodeStats:
    """Return the rounds that the pieces of an answer show, one for each, with drafts as long as the configuration allows."""
    if config.method == "none":
        return DecodeStats((Round(0, 0, 1),) * completion.decoded)
    sizes = [size for size in completion.piece_sizes[1:] if size]
    return DecodeStats(tuple(Round(max(config.num_speculative_tokens, size - 1), size - 1, size) for size in sizes))


def request_metrics(measured: Measurement) -> dict[str, float]:
    """Return the metrics of an engine's requests, those of plain decoding as ``baseline_...``; empty if there are none."""
    plain = {f"{BASELINE}_{name}": value for name, value in _metrics(measured.baseline).items()}
    return _metrics(measured.candidate) | plain


def _metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """Return the throughput, by Little's law, and the latencies of the requests of samples; empty if they have none."""
    requests = [request for sample in samples for request in sample.requests]
    if not requests:
        return {}
    seconds = sum((each.first_seconds + each.decode_seconds) / each.concurrency for each in requests)
    found = {"throughput": sum(each.tokens for each in requests) / seconds}
    latencies = {
        "ttft": [each.first_seconds for each in requests],
        "tpot": [each.decode_seconds / each.decoded_tokens for each in requests if each.decoded_tokens],
    }
    for name, values in latencies.items():
        for percent in (50, 95) if values else ():
            found[f"{name}_p{percent}"] = float(np.percentile(values, percent))
    return found

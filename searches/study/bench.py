"""The interface between the decisions of a search and its measurements.

A search sees samples, paired prompt by prompt with plain decoding. They come from a back end that runs a model, or from a
simulated decoder.

Samples of a window in which the machine was slower or faster than usual have drifted. Plain decoding is measured with every
candidate, and all samples of a prompt form a row. A slow window slows down the whole row; a stall slows down one sample. If
stalls of plain decoding alone were measured again, its time would drop while candidates kept their stalls, and every speedup
would be biased. A row is therefore judged by the mean over all its samples, and replaced as a whole. A window as long as a
trial leaves the ratio of a row's samples as it is, and is not looked for. The mean of many finalists hides the stall of one
sample; the finals therefore look for stalls of any.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from time import monotonic
from typing import Any

from scipy.stats import theilslopes

from layerskip import PromptSet, Sampling, SpeculativeConfig
from layerskip.measure.measure import Task
from layerskip.measure.measurement import Sample
from searches.backends.backend import BASELINE as BASELINE
from searches.backends.backend import Backend, BackendError, Comparison, Workload
from searches.backends.backend import Row as Row
from searches.results import ResultLog

_STALL = 3.0  # how many times the tolerated drift, as a logarithm, one sample may deviate; its noise exceeds that of a mean


class ModelBench:
    """Measurement of configurations side by side by a back end, with a sampling, a load, and new tokens per turn."""

    def __init__(self, backend: Backend, sampling: Sampling, max_new_tokens: int, workload: Workload = Workload()) -> None:
        self._backend, self._sampling, self._max_new_tokens, self._workload = backend, sampling, max_new_tokens, workload
        self.exact = backend.exact  # whether outputs must equal plain decoding's token for token, as in float32
        # Everything that samples depend on, except configurations, prompts and seed, as plain values.
        self.conditions: Any = [backend.describe(), sampling.to_dict(), max_new_tokens, asdict(workload)]

    def compare(
        self,
        configs: Mapping[str, SpeculativeConfig],
        prompts: PromptSet,
        repeats: int,
        seed: int,
        without: Collection[str] = (),
        before: PromptSet | None = None,
    ) -> Iterator[dict[str, Sample]]:
        """Yield one sample per name after each prompt, as :meth:`~searches.backends.backend.Backend.compare` does."""
        task = Task(self._sampling, self._max_new_tokens, seed)
        rows = self._backend.compare(Comparison(configs, prompts, task, self._workload, repeats, without, before))
        return rows if self._workload.goal == "decoding" else map(_whole_requests, rows)

    def metrics(self) -> dict[str, float]:
        """Return what the back end reports of the last comparison beside its samples."""
        return self._backend.metrics()


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
    measure: Callable[..., Iterator[Row]],
    prompts: PromptSet,
    log: ResultLog,
    prefix: str,
    before: PromptSet | None = None,
    together: bool = False,
) -> Iterator[Row]:
    """Yield one row per prompt, in order; only rows that are not in the log are measured, and added to it.

    Drafters that learn decode the prompts ``before`` and the logged ones first, unmeasured. ``measure(prompts, before=...)``
    returns rows. The prefix distinguishes these rows in the log from others of the same prompts. Prompts that are decoded
    ``together`` are all measured again if one of them is missing.
    """
    logged = {item.id for item in prompts if f"{prefix} {item.id}" in log}
    logged = set() if together and len(logged) < len(prompts) else logged
    known, missing = (
        PromptSet(tuple(item for item in prompts if (item.id in logged) is is_logged)) for is_logged in (True, False)
    )
    measured = measure(missing, before=PromptSet((*(before or ()), *known))) if len(missing) else iter(())
    for item in prompts:
        name = f"{prefix} {item.id}"
        if item.id not in logged:
            start = monotonic()
            samples = {contender: sample.to_dict() for contender, sample in next(measured).items()}
            log.add(name, {"samples": samples, "seconds": monotonic() - start})
        yield {contender: Sample.from_dict(fields) for contender, fields in log[name]["samples"].items()}


def surviving_rows(
    bench: ModelBench,
    configs: Mapping[str, SpeculativeConfig],
    prompts: PromptSet,
    seed: int,
    without: Collection[str],
    before: PromptSet,
) -> Iterator[dict[str, Sample]]:
    """Yield the rows of :meth:`ModelBench.compare`; when a configuration fails, continue without it from the same prompt."""
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


def logged_seconds(log: ResultLog) -> float:
    """Return the seconds that measuring the rows of a log took, including the check of their outputs."""
    return sum(float(row["seconds"]) for row in log.values())


def drifted_rows(rows: Sequence[Row], drift: float) -> list[bool]:
    """Return for each row, which is of one prompt, whether the machine had drifted while it was measured.

    ``drift`` is the tolerated share by which seconds per round may differ from what the other rows predict, in the geometric
    mean over the row.
    """
    return [bool(row) and abs(statistics.fmean(row)) > math.log1p(drift) for row in _offsets(rows)]


def stalled_rows(rows: Sequence[Row], drift: float) -> list[bool]:
    """Return for each row whether a round of one of its samples took far longer than the other rows predict."""
    return [bool(row) and max(row) > _STALL * math.log1p(drift) for row in _offsets(rows)]


def _offsets(rows: Sequence[Row]) -> list[list[float]]:
    """Return for each row the log ratios of its samples' seconds per round to the expected ones."""
    offsets: list[list[float]] = [[] for _ in rows]
    for name in dict.fromkeys(name for row in rows for name in row):
        places = [place for place, row in enumerate(rows) if name in row and row[name].stats.rounds]
        for place, offset in zip(places, _offsets_of([rows[place][name] for place in places]), strict=True):
            offsets[place].append(offset)
    return offsets


def _offsets_of(samples: Sequence[Sample]) -> list[float]:
    """Return the log ratio of each sample's seconds per round to the expected ones.

    Drafting is left out: a cascade may draft at a high cost on one prompt and for nothing on the next. A round is slower
    after a long prompt, whose length shows in the prefill. It is also slower if it verifies more tokens; a lookup finds many
    on one prompt and few on another.
    """
    seconds = [(sample.decode_seconds - sample.draft_seconds) / len(sample.stats.rounds) for sample in samples]
    prefill = [sample.prefill_seconds for sample in samples]
    verified = [statistics.fmean(round_.drafted for round_ in sample.stats.rounds) for sample in samples]
    expected = _fit(prefill, seconds)
    rest = [own - usual for own, usual in zip(seconds, expected, strict=True)]
    expected = [usual + extra for usual, extra in zip(expected, _fit(verified, rest), strict=True)]
    return [math.log(own / usual) if own > 0 and usual > 0 else 0.0 for own, usual in zip(seconds, expected, strict=True)]


def _fit(xs: Sequence[float], ys: Sequence[float]) -> list[float]:
    """Return the fitted ``ys`` of a Theil-Sen line, which few outliers do not move; their median if all ``xs`` are equal."""
    if len(set(xs)) > 1:
        slope, intercept, *_ = theilslopes(ys, xs)
        return [float(intercept + slope * x) for x in xs]
    return [statistics.median(ys)] * len(ys) if ys else []

"""Paired samples of a comparison, their summary metrics and intervals. No clock and no torch in here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from layerskip.decoding.stats import DecodeStats, Round
from layerskip.measure.losslessness import Divergence, Losslessness
from layerskip.prompts import PromptError

RESAMPLES = 2000
MIN_RESAMPLED = 5  # prompts; resamples of fewer say next to nothing about a new prompt
CONFIDENCE = 0.95
_SUMMED = ("tokens", "decoded_tokens", "prefill_seconds", "decode_seconds", "draft_seconds")  # over the turns of a sample


def _interval_of_ratio(table: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    """Return a confidence interval of a speedup: on either side the wider of Student's t and the studentized bootstrap.

    Both are computed for the logarithm, with the standard error of a ratio of totals (the delta method). The t interval
    accounts for a small number of prompts, the bootstrap for skewed speedups. With fewer than five prompts only the t
    interval is used, as too many resamples repeat a single prompt. Prompts are resampled with replacement.

    Args:
        table: ``[prompts, 4]``, at least two: tokens and seconds of the baseline, tokens and seconds of the candidate.
    """
    prompts = len(table)
    ratio, error = _log_ratio(table)
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    # The quantile of one degree of freedom, the fewest possible, bounds the deviations of nearly equal prompts.
    student, maximum = (float(stdtrit(freedom, tails[1])) for freedom in (prompts - 1, 1))
    if prompts < MIN_RESAMPLED:
        return float(np.exp(ratio - student * error)), float(np.exp(ratio + student * error))
    chosen = np.random.default_rng(0).integers(prompts, size=(RESAMPLES, prompts))
    ratios, errors = _log_ratio(table[chosen])
    varied = errors > 1e-6 * error  # a resample of a single prompt has no error to divide by
    deviations = np.clip((ratios[varied] - ratio) / errors[varied], -maximum, maximum)
    below, above = np.quantile(deviations, tails) if len(deviations) else (-student, student)
    low, high = ratio - max(above, student) * error, ratio - min(below, -student) * error
    return float(np.exp(low)), float(np.exp(high))


def _log_ratio(tables: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the log speedup and its standard error for each ``[prompts, 4]`` table of totals, in ``[..., prompts, 4]``."""
    sums, prompts = tables.sum(axis=-2), tables.shape[-2]
    signs = np.array([-1.0, 1.0, 1.0, -1.0])
    influence = np.einsum("...pk,...k->...p", tables, signs / sums)
    error = np.sqrt(np.square(influence).sum(axis=-1) * prompts / (prompts - 1))
    return np.log(sums) @ signs, error


@dataclass(frozen=True)
class Request:
    """A request to an engine that serves several at once."""

    concurrency: int
    tokens: int
    decoded_tokens: int  # those after the first piece
    first_seconds: float  # until the first piece
    decode_seconds: float  # from then on


@dataclass(frozen=True)
class Sample:
    """One contender on one prompt; the turns of a conversation are added up. Capturing passes, done once, takes no time."""

    prompt_id: str
    category: str
    tokens: int  # new ones
    decoded_tokens: int  # those that decoding gave, without the ones that prefill gave
    prefill_seconds: float  # until prefill was done and its tokens known
    decode_seconds: float  # from then on
    peak_memory_bytes: int  # device memory on CUDA, process memory on a CPU
    stats: DecodeStats
    lossless: Losslessness = Losslessness(0)  # the comparison with the reference's output
    draft_seconds: float = 0.0  # the part of ``decode_seconds`` spent on drafting; 0.0 for a peer, which reports none
    copies_bytes: int = 0  # of the weights at fewer bits that its drafts read
    requests: tuple[Request, ...] = ()  # those of an engine; empty for decoding in this process

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second of decoding; 0.0 if nothing was decoded."""
        return self.decoded_tokens / self.decode_seconds if self.decoded_tokens else 0.0

    @property
    def end_to_end_tokens_per_second(self) -> float:
        """New tokens per second of prefill and decoding."""
        return self.tokens / (self.prefill_seconds + self.decode_seconds)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Sample:
        """Return the sample that :meth:`to_dict` wrote; JSON turns its tuples into lists."""
        rounds = tuple(Round(**row) for row in fields["stats"]["rounds"])
        checked = fields["lossless"]
        lossless = Losslessness(**checked | {"divergences": tuple(Divergence(**row) for row in checked["divergences"])})
        requests = tuple(Request(**row) for row in fields.get("requests", ()))
        return cls(**dict(fields) | {"stats": DecodeStats(rounds), "lossless": lossless, "requests": requests})

    @classmethod
    def join(cls, parts: Sequence[Sample]) -> Sample:
        """Return several outputs of one prompt as one sample."""
        return cls(
            prompt_id=parts[0].prompt_id,
            category=parts[0].category,
            **{name: sum(getattr(p, name) for p in parts) for name in _SUMMED},
            peak_memory_bytes=max(p.peak_memory_bytes for p in parts),
            copies_bytes=max(p.copies_bytes for p in parts),
            stats=DecodeStats.join(p.stats for p in parts),
            lossless=Losslessness.join(p.lossless for p in parts),
            requests=tuple(request for p in parts for request in p.requests),
        )


@dataclass(frozen=True)
class Measurement:
    """A candidate compared with the baseline on the same prompts, pair by pair."""

    baseline: tuple[Sample, ...]
    candidate: tuple[Sample, ...]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Sample]], baseline: str, candidate: str) -> Measurement:
        """Pair the samples of two contenders on the prompts that both decoded."""
        rows = [row for row in rows if baseline in row and candidate in row]
        return cls(tuple(row[baseline] for row in rows), tuple(row[candidate] for row in rows))

    @property
    def tokens_per_second(self) -> float:
        """The candidate's decoded tokens per second of decoding, over all prompts."""
        return _rate(self.candidate)

    @property
    def baseline_tokens_per_second(self) -> float:
        """The baseline's decoded tokens per second of decoding, over all prompts."""
        return _rate(self.baseline)

    @property
    def decoded(self) -> Measurement:
        """The pairs in which both decoded something; an output that ends with its first token has no speed."""
        return self._of(lambda b, c: bool(b.decoded_tokens and c.decoded_tokens))

    @property
    def prompts(self) -> int:
        return len({sample.prompt_id for sample in self.candidate})

    @property
    def speedup(self) -> float:
        """The ratio of tokens per second over the pairs in which both decoded something; 1.0 if there are none."""
        measured = self.decoded
        return _rate(measured.candidate) / _rate(measured.baseline) if measured.candidate else 1.0

    @property
    def spec_bench_speedup(self) -> float:
        """The speedup as Spec-Bench computes it: the ratio of the prompts' mean tokens per second, prefill included."""
        measured = self.decoded
        candidate, baseline = (
            sum(s.end_to_end_tokens_per_second for s in each) for each in (measured.candidate, measured.baseline)
        )
        return candidate / baseline if measured.candidate else 1.0

    @property
    def speedups(self) -> tuple[float, ...]:
        return tuple(pair_speedup(one, other) for one, other in zip(self.baseline, self.candidate, strict=True))

    @property
    def by_category(self) -> dict[str, Measurement]:
        categories = sorted({s.category for s in self.candidate})
        return {category: self._of(lambda _, c, category=category: c.category == category) for category in categories}

    def _of(self, chosen: Callable[..., bool]) -> Measurement:
        """Return the pairs for which a function of baseline and candidate is true."""
        pairs = [pair for pair in zip(self.baseline, self.candidate, strict=True) if chosen(*pair)]
        return Measurement(tuple(b for b, _ in pairs), tuple(c for _, c in pairs))

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Return a confidence interval of the speedup; of one prompt, which says nothing about others, a point.

        A prompt counts with both sides and all its repeats, as repeats of a prompt say nothing about other prompts.
        """
        prompts: dict[str, NDArray[np.float64]] = {}
        measured = self.decoded
        for b, c in zip(measured.baseline, measured.candidate, strict=True):
            row = np.array([b.decoded_tokens, b.decode_seconds, c.decoded_tokens, c.decode_seconds])
            prompts[c.prompt_id] = prompts.get(c.prompt_id, np.zeros(4)) + row
        if len(prompts) < 2:
            return self.speedup, self.speedup
        return _interval_of_ratio(np.array(list(prompts.values())), confidence)

    @property
    def stats(self) -> DecodeStats:
        return DecodeStats.join([s.stats for s in self.candidate])

    @property
    def lossless(self) -> Losslessness:
        """The comparison of the candidate's outputs with the baseline's."""
        return Losslessness.join([s.lossless for s in self.candidate])

    @property
    def draft_share(self) -> float:
        """The share of the candidate's decoding time spent on drafting."""
        seconds = sum(s.decode_seconds for s in self.candidate)
        return sum(s.draft_seconds for s in self.candidate) / seconds if seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics as plain values, for exports and logs.

        ``empty_prompts`` of the ``prompts`` have no speed; those by category leave them out.
        """
        stats, (low, high), measured = self.stats, self.interval(), self.decoded
        kinds = measured.by_category
        return {
            "tokens_per_second": self.tokens_per_second,
            "baseline_tokens_per_second": self.baseline_tokens_per_second,
            "speedup": self.speedup,
            "speedup_low": low,
            "speedup_high": high,
            "speedup_by_category": {category: part.speedup for category, part in kinds.items()},
            "interval_by_category": {category: list(part.interval()) for category, part in kinds.items()},
            "spec_bench_speedup": self.spec_bench_speedup,
            "spec_bench_speedup_by_category": {category: part.spec_bench_speedup for category, part in kinds.items()},
            "acceptance_rate": stats.acceptance_rate,
            "acceptance_by_position": list(stats.acceptance_by_position),
            "acceptance_length_histogram": {str(n): count for n, count in stats.acceptance_length_histogram.items()},
            "conditional_acceptance_rate": {str(n): rate for n, rate in stats.conditional_acceptance_rate.items()},
            "mean_acceptance_length": stats.mean_acceptance_length,
            "mean_acceptance_length_by_category": {
                category: part.stats.mean_acceptance_length for category, part in kinds.items()
            },
            "draft_share": self.draft_share,
            "prompts": self.prompts,
            "empty_prompts": self.prompts - measured.prompts,
            "prompts_by_category": {category: part.prompts for category, part in kinds.items()},
            "tokens": sum(s.tokens for s in self.candidate),
            "prefill_seconds": sum(s.prefill_seconds for s in self.candidate),
            "decode_seconds": sum(s.decode_seconds for s in self.candidate),
            "baseline_prefill_seconds": sum(s.prefill_seconds for s in self.baseline),
            "baseline_decode_seconds": sum(s.decode_seconds for s in self.baseline),
            "peak_memory_bytes": max((s.peak_memory_bytes for s in self.candidate), default=0),
            "copies_bytes": max((s.copies_bytes for s in self.candidate), default=0),
            "baseline_peak_memory_bytes": max((s.peak_memory_bytes for s in self.baseline), default=0),
            "losslessness": self.lossless.to_dict(),
        }

    def table(self) -> dict[str, list[Any]]:
        """Return the pairs as columns, one row per pair."""
        measured = ("tokens", "tokens_per_second", "prefill_seconds", "decode_seconds", "peak_memory_bytes")
        return {
            **{name: [getattr(row, name) for row in self.candidate] for name in ("prompt_id", "category", *measured)},
            "baseline_tokens_per_second": [row.tokens_per_second for row in self.baseline],
            "baseline_decode_seconds": [row.decode_seconds for row in self.baseline],
            "speedup": list(self.speedups),
            "acceptance_rate": [row.stats.acceptance_rate for row in self.candidate],
            "mean_acceptance_length": [row.stats.mean_acceptance_length for row in self.candidate],
            "lossless": [row.lossless.verdict for row in self.candidate],
        }


def check_output(samples: Iterable[Sample], kind: str = "") -> None:
    """Refuse samples of plain decoding none of which decoded anything; raises :class:`PromptError` with their kind."""
    if not any(sample.decoded_tokens for sample in samples):
        raise PromptError(
            f"prompts: every {kind}output ends with its first token, so there is no speed to compare; check the chat "
            "template, the end-of-sequence tokens and max_new_tokens"
        )


def pair_speedup(baseline: Sample, candidate: Sample) -> float:
    """Return the candidate's tokens per second over the baseline's on one prompt; 1.0 if either decoded nothing."""
    if not baseline.decoded_tokens or not candidate.decoded_tokens:
        return 1.0
    return candidate.tokens_per_second / baseline.tokens_per_second


def _rate(samples: Sequence[Sample]) -> float:
    seconds = sum(s.decode_seconds for s in samples if s.decoded_tokens)
    return sum(s.decoded_tokens for s in samples) / seconds if seconds else 0.0

"""The figures of a measurement, worked out by hand and against SciPy's bootstrap."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import bootstrap, sem, t

from layerskip import DecodeStats, Measurement, Round
from layerskip.measure.losslessness import Divergence, Losslessness
from layerskip.measure.measurement import Sample, pair_speedup


def _sample(decoded: int, seconds: float, prompt_id: str = "p", category: str = "chat", **changes: Any) -> Sample:
    fields: dict[str, Any] = dict(tokens=decoded + 1, prefill_seconds=0.25, peak_memory_bytes=1000, stats=DecodeStats())
    return Sample(prompt_id, category, decoded_tokens=decoded, decode_seconds=seconds, **fields | changes)


# Baseline: 10 + 30 tokens in 1 + 2 seconds; candidate: 10 + 30 in 0.5 + 1.5.
TWO = Measurement(
    (_sample(10, 1.0, "a", "chat"), _sample(30, 2.0, "b", "code")),
    (
        _sample(10, 0.5, "a", "chat", stats=DecodeStats((Round(4, 4, 5), Round(4, 1, 2)))),
        _sample(30, 1.5, "b", "code", stats=DecodeStats((Round(2, 1, 2),)), peak_memory_bytes=3000, copies_bytes=70),
    ),
)


@pytest.mark.parametrize(("baseline", "candidate"), [(0, 5), (5, 0), (0, 0)])
def test_a_pair_in_which_one_side_decodes_nothing_has_no_speedup(baseline: int, candidate: int) -> None:
    """Sampled outputs may end at once on one side only."""
    pair = _sample(baseline, 0.5), _sample(candidate, 0.25)
    assert pair_speedup(*pair) == 1.0
    measured = Measurement(pair[:1], pair[1:])
    assert (measured.speedups, measured.speedup, measured.by_category["chat"].speedup) == ((1.0,), 1.0, 1.0)
    assert measured.interval() == (1.0, 1.0)


def test_prompts_that_decode_nothing_are_counted_and_have_no_speed_by_category() -> None:
    empty = tuple(_sample(0, 0.125, name, category) for name, category in (("c", "chat"), ("d", "maths"), ("e", "maths")))
    padded = Measurement((*TWO.baseline, *empty), (*TWO.candidate, *empty))
    assert (padded.speedup, padded.interval()) == (pytest.approx(TWO.speedup), pytest.approx(TWO.interval()))
    figures = padded.to_dict()
    assert (figures["prompts"], figures["empty_prompts"]) == (5, 3)
    assert figures["speedup_by_category"] == pytest.approx({"chat": 2.0, "code": 4 / 3})
    assert figures["prompts_by_category"] == {"chat": 1, "code": 1}
    repeated = Measurement((_sample(0, 0.1, "a"), _sample(9, 1.0, "a")), (_sample(0, 0.1, "a"), _sample(9, 1.0, "a")))
    assert repeated.to_dict()["empty_prompts"] == 0  # a repeat, if tokens are sampled, decoded something


def _noisy_measurement(prompts: int, spread: float, random: np.random.Generator) -> Measurement:
    """Prompts of one length whose speedups are log-normal around 1.5; the wider the spread, the more skewed."""
    seconds = np.exp(spread * random.normal(size=prompts) - spread**2 / 2) / 1.5
    return Measurement(
        tuple(_sample(10, 1.0, f"p{i}") for i in range(prompts)),
        tuple(_sample(10, float(s), f"p{i}") for i, s in enumerate(seconds)),
    )


@pytest.mark.parametrize(("prompts", "spread"), [(4, 0.3), (6, 0.03), (12, 0.3), (24, 0.6)])
def test_the_interval_covers_the_true_speedup(prompts: int, spread: float) -> None:
    """Efron's percentiles cover it in 85, 90 and 91 % of the last three cases."""
    random = np.random.default_rng(1)
    intervals = [_noisy_measurement(prompts, spread, random).interval() for _ in range(400)]
    assert 0.93 <= np.mean([low <= 1.5 <= high for low, high in intervals]) <= 0.99


def test_with_many_prompts_the_interval_equals_the_bootstraps() -> None:
    """With many prompts, here of different lengths, all methods agree; SciPy's percentile interval is one."""
    random = np.random.default_rng(2)
    tokens = random.integers(5, 64, size=400)
    plain = tokens * random.normal(0.03, 0.002, size=400)
    fast = plain / random.normal(1.4, 0.3, size=400)
    sides = (
        [_sample(int(n), float(s), f"p{i}") for i, (n, s) in enumerate(zip(tokens, each, strict=True))]
        for each in (plain, fast)
    )
    measured = Measurement(*map(tuple, sides))
    found = bootstrap(
        (plain, fast),
        lambda a, b, axis=-1: a.sum(axis) / b.sum(axis),
        paired=True,
        method="percentile",
        n_resamples=20_000,
        rng=5,
    ).confidence_interval
    low, high = measured.interval()
    assert (low, high) == pytest.approx((found.low, found.high), abs=0.15 * (found.high - found.low))
    assert low < measured.speedup < high


@pytest.mark.parametrize("prompts", [2, 3, 4, 5, 8])
def test_with_few_prompts_the_interval_is_at_least_students(prompts: int) -> None:
    """With fewer than five prompts it equals Student's."""
    measured = _noisy_measurement(prompts, 0.01, np.random.default_rng(0))
    logs = np.log(measured.speedups)
    student = t.interval(0.95, prompts - 1, loc=logs.mean(), scale=sem(logs))
    low, high = np.log(measured.interval())
    if prompts < 5:
        assert (low, high) == pytest.approx(student, abs=1e-3)
    assert low <= student[0] + 1e-3
    assert high >= student[1] - 1e-3


@pytest.mark.parametrize("seconds", [(1.0,) * 5, (1.0, 1.0, 1.0, 1.0, 9.0), (1.0, 1.0 + 1e-9, 1.0, 1.0, 9.0), (1.0, 3.0)])
def test_nearly_equal_prompts_give_finite_limits(seconds: tuple[float, ...]) -> None:
    sides = ([_sample(10, s, f"p{i}") for i, s in enumerate(each)] for each in ((2.0,) * len(seconds), seconds))
    measured = Measurement(*map(tuple, sides))
    low, high = measured.interval()
    assert 0 < low <= measured.speedup * (1 + 1e-12) and measured.speedup <= high * (1 + 1e-12) < np.inf
    json.dumps(measured.to_dict(), allow_nan=False)


def test_the_interval_is_repeatable_and_shrinks_with_more_prompts() -> None:
    few, many = (_noisy_measurement(prompts, 0.3, np.random.default_rng(3)) for prompts in (10, 400))
    repeated = Measurement(few.baseline * 2, few.candidate * 2)  # repeats of a prompt are one prompt
    assert few.interval() == few.interval() == pytest.approx(repeated.interval())
    widths = [high - low for low, high in (few.interval(), many.interval())]
    assert widths[1] < widths[0] / 2


def test_turns_of_a_conversation_are_added_up() -> None:
    near = Losslessness(1, (Divergence("p", 3, 0.1, 0.2),))
    first = _sample(10, 1.0, stats=DecodeStats((Round(4, 4, 5),)), lossless=Losslessness(1))
    second = _sample(20, 3.0, stats=DecodeStats((Round(4, 0, 1),)), peak_memory_bytes=5000, copies_bytes=9, lossless=near)
    joined = Sample.join([first, second])
    assert (joined.prompt_id, joined.category) == ("p", "chat")
    assert (joined.tokens, joined.decoded_tokens) == (32, 30)
    assert (joined.prefill_seconds, joined.decode_seconds) == (0.5, 4.0)
    assert joined.tokens_per_second == pytest.approx(7.5)
    assert (joined.peak_memory_bytes, joined.copies_bytes) == (5000, 9)
    assert joined.stats.acceptance_rate == 0.5
    assert (joined.lossless.compared, joined.lossless.verdict) == (2, "near_tie")


def test_figures_are_plain_json() -> None:
    """Speed is tokens over seconds of all prompts."""
    figures = json.loads(json.dumps(TWO.to_dict(), allow_nan=False))
    assert (TWO.tokens_per_second, TWO.baseline_tokens_per_second) == pytest.approx((20.0, 40 / 3))
    assert (figures["speedup"], TWO.speedups) == (pytest.approx(1.5), pytest.approx((2.0, 4 / 3)))
    assert figures["speedup_low"] <= 1.5 <= figures["speedup_high"]
    assert figures["speedup_by_category"] == pytest.approx({"chat": 2.0, "code": 4 / 3})
    assert figures["interval_by_category"] == {"chat": pytest.approx([2.0, 2.0]), "code": pytest.approx([4 / 3, 4 / 3])}
    # With a prefill of 0.25 seconds, which gives one token: 11 and 31 in 1.25 and 2.25 seconds, then in 0.75 and 1.75.
    assert figures["spec_bench_speedup"] == pytest.approx((11 / 0.75 + 31 / 1.75) / (11 / 1.25 + 31 / 2.25))
    assert figures["spec_bench_speedup_by_category"] == pytest.approx({"chat": 1.25 / 0.75, "code": 2.25 / 1.75})
    assert figures["mean_acceptance_length_by_category"] == {"chat": 7 / 2, "code": 2.0}
    assert figures["acceptance_length_histogram"] == {"2": 2, "5": 1}
    assert figures["conditional_acceptance_rate"] == pytest.approx({"1": 1, "2": 1, "3": 1 / 3, "4": 1, "5": 1})
    assert (figures["prompts"], figures["tokens"]) == (2, 42)
    assert (figures["decode_seconds"], figures["baseline_decode_seconds"]) == (2.0, 3.0)
    assert (figures["prefill_seconds"], figures["baseline_prefill_seconds"]) == (0.5, 0.5)
    assert (figures["peak_memory_bytes"], figures["baseline_peak_memory_bytes"]) == (3000, 1000)
    assert (figures["copies_bytes"], Measurement(TWO.baseline, TWO.baseline).to_dict()["copies_bytes"]) == (70, 0)
    assert (figures["acceptance_rate"], figures["mean_acceptance_length"]) == pytest.approx((0.6, 3.0))
    assert figures["acceptance_by_position"] == pytest.approx([1.0, 1 / 3, 0.5, 0.5])
    verdicts = (Losslessness(1), Losslessness(1, (Divergence("b", 0, 9.0, 0.1),)))
    candidate = tuple(replace(s, lossless=v) for s, v in zip(TWO.candidate, verdicts, strict=True))
    changed = Measurement(TWO.baseline, candidate)
    found = [each.to_dict()["losslessness"]["verdict"] for each in (TWO, changed)]
    assert (found, changed.table()["lossless"]) == (["unchecked", "different"], ["exact", "different"])
    nothing = Measurement((), ()).to_dict()
    json.dumps(nothing, allow_nan=False)
    assert (nothing["speedup"], nothing["spec_bench_speedup"], nothing["tokens"]) == (1.0, 1.0, 0)

"""Drift is detected, and measuring drifted rows again leaves speedups unbiased."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from layerskip import Measurement
from layerskip.decoding.stats import DecodeStats, Round
from layerskip.measure.losslessness import Losslessness
from layerskip.measure.measurement import Sample
from searches.study.bench import drifted_rows

Row = dict[str, Sample]


def _row(place: int, seconds: Mapping[str, float], rounds: int = 40) -> Row:
    return {
        name: Sample(f"prompt {place}", "x", 41, 40, 0.1, taken, 1, DecodeStats((Round(0, 0, 1),) * rounds), Losslessness(1))
        for name, taken in seconds.items()
    }


def test_a_slow_window_is_drift_and_a_stall_of_one_sample_is_not() -> None:
    rows = [_row(place, {"plain": 4.0, "one": 3.0, "other": 2.0}) for place in range(6)]
    rows[2] = _row(2, {"plain": 6.0, "one": 4.5, "other": 3.0})
    rows[4] = _row(4, {"plain": 6.0, "one": 3.0, "other": 2.0})
    assert drifted_rows(rows, 0.3) == [False, False, True, False, False, False]
    rows[3].pop("other")  # a dropped configuration does not matter
    rows[5] = _row(5, {"plain": 2.0, "one": 1.5})
    assert drifted_rows(rows, 0.3) == [False, False, True, False, False, True]


def test_longer_verification_on_one_prompt_is_not_drift() -> None:
    """Verifying six tokens may take as long as two steps, and a lookup drafts six if a text is copied."""
    rows = [_row(place, {"plain": 4.0}) for place in range(6)]
    for place, drafted in enumerate((0, 1, 2, 1, 6, 0)):
        copied = DecodeStats((Round(drafted, 0, 1),) * 40)
        for name in ("one", "other", "third"):
            rows[place][name] = replace(_row(place, {name: 4.0 * (1 + drafted / 6)})[name], stats=copied)
    assert not any(drifted_rows(rows, 0.3))
    rows[1] = {name: replace(sample, decode_seconds=sample.decode_seconds * 1.5) for name, sample in rows[1].items()}
    assert drifted_rows(rows, 0.3) == [False, True, False, False, False, False]


def test_a_longer_prompt_and_expensive_drafts_are_not_drift() -> None:
    rows = [_row(place, {"plain": 4.0 + place, "one": 2.0 + place / 2}) for place in range(6)]
    for place, row in enumerate(rows):
        row.update({name: replace(sample, prefill_seconds=0.1 + place) for name, sample in row.items()})
    assert not any(drifted_rows(rows, 0.3))
    one = rows[2]["one"]
    rows[2]["one"] = replace(one, decode_seconds=one.decode_seconds + 6.0, draft_seconds=6.0)
    assert not any(drifted_rows(rows, 0.05))
    rows[3] = {name: replace(sample, decode_seconds=2 * sample.decode_seconds) for name, sample in rows[3].items()}
    assert drifted_rows(rows, 0.3) == [False, False, False, True, False, False]


def test_measuring_drifted_rows_again_does_not_bias_speedups() -> None:
    """If only stalls of plain decoding were measured again, a speedup of 1.10 would come out as 1.03."""
    random = np.random.default_rng(0)

    def measure(place: int) -> Row:
        stalls = 1 + 0.8 * (random.random(2) < 0.1)
        noise = np.exp(0.02 * random.normal(size=2))
        return _row(place, dict(zip(("plain", "one"), np.array([4.0, 4.0 / 1.1]) * stalls * noise, strict=True)))

    speedups, again = [], 0
    for _ in range(60):
        rows = [measure(place) for place in range(24)]
        drifted = drifted_rows(rows, 0.3)
        again += sum(drifted)
        rows = [measure(place) if drifted[place] else row for place, row in enumerate(rows)]
        speedups.append(math.log(Measurement.of(rows, "plain", "one").speedup))
    assert again > 60  # enough for the test
    assert math.exp(statistics.fmean(speedups)) == pytest.approx(1.10, rel=0.01)

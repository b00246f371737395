"""When a machine's pace has moved, and that measuring again then leaves speedups where they are."""

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
from searches.study.drift import moved

Row = dict[str, Sample]


def _row(place: int, seconds: Mapping[str, float], rounds: int = 40) -> Row:
    return {
        name: Sample(f"prompt {place}", "x", 41, 40, 0.1, taken, 1, DecodeStats((Round(0, 0, 1),) * rounds), Losslessness(1))
        for name, taken in seconds.items()
    }


def test_a_window_shows_in_all_who_were_in_it_and_a_stall_in_one() -> None:
    rows = [_row(place, {"plain": 4.0, "one": 3.0, "other": 2.0}) for place in range(6)]
    rows[2] = _row(2, {"plain": 6.0, "one": 4.5, "other": 3.0})
    rows[4] = _row(4, {"plain": 6.0, "one": 3.0, "other": 2.0})
    assert moved(rows, 0.3) == [False, False, True, False, False, False]
    rows[3].pop("other")  # who left is missed by nobody
    rows[5] = _row(5, {"plain": 2.0, "one": 1.5})
    assert moved(rows, 0.3) == [False, False, True, False, False, True]


def test_who_decodes_in_fewer_rounds_is_not_taken_for_a_faster_machine() -> None:
    rows = [_row(place, {"plain": 4.0}) | _row(place, {"one": 3.0}) for place in range(6)]
    rows[2]["one"] = _row(2, {"one": 1.0}, rounds=13)["one"]
    assert not any(moved(rows, 0.05))


def test_who_drafts_dearly_on_one_prompt_is_not_taken_for_a_slower_machine() -> None:
    rows = [_row(place, {"plain": 4.0, "one": 3.0}) for place in range(6)]
    rows[2]["one"] = replace(rows[2]["one"], decode_seconds=9.0, draft_seconds=6.0)
    assert not any(moved(rows, 0.05))


def test_who_verifies_more_on_one_prompt_is_not_taken_for_a_slower_machine() -> None:
    """Six tokens at once may take two steps' time, and lookups find six where a text is copied."""
    rows = [_row(place, {"plain": 4.0}) for place in range(6)]
    for place, drafted in enumerate((0, 1, 2, 1, 6, 0)):
        copied = DecodeStats((Round(drafted, 0, 1),) * 40)
        for name in ("one", "other", "third"):
            rows[place][name] = replace(_row(place, {name: 4.0 * (1 + drafted / 6)})[name], stats=copied)
    assert not any(moved(rows, 0.3))
    rows[1] = {name: replace(sample, decode_seconds=sample.decode_seconds * 1.5) for name, sample in rows[1].items()}
    assert moved(rows, 0.3) == [False, True, False, False, False, False]


def test_nothing_decoded_says_nothing() -> None:
    empty = _row(0, {"plain": 0.0, "one": 0.0}, rounds=0)
    assert moved([empty, empty], 0.3) == [False, False]
    assert moved([], 0.3) == []


@pytest.mark.parametrize("rate", [0.03, 0.1])
def test_measuring_again_what_moved_leaves_a_speedup_where_it_is(rate: float) -> None:
    """Readings stall by themselves, plain decoding's as often as the other's. Judged by plain decoding's alone, a speedup
    of 1.10 would come out as 1.07 or 1.03."""
    random = np.random.default_rng(0)

    def read(place: int) -> Row:
        stalls = 1 + 0.8 * (random.random(2) < rate)
        noise = np.exp(0.02 * random.normal(size=2))
        return _row(place, dict(zip(("plain", "one"), np.array([4.0, 4.0 / 1.1]) * stalls * noise, strict=True)))

    found, again = [], 0
    for _ in range(150):
        rows = [read(place) for place in range(24)]
        off = moved(rows, 0.3)
        again += sum(off)
        rows = [read(place) if off[place] else row for place, row in enumerate(rows)]
        found.append(math.log(Measurement.of(rows, "plain", "one").speedup))
    assert again > 100  # so it was put to the test
    assert math.exp(statistics.fmean(found)) == pytest.approx(1.10, rel=0.01)

"""Finals on a bench with known speedups: dropped finalists, ties, the winner and its report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from layerskip import PromptSet, SpeculativeConfig
from layerskip.measure.losslessness import Divergence, Losslessness
from layerskip.measure.measurement import Sample
from searches.report import markdown as report
from searches.study.bench import BASELINE
from searches.study.finals import Finals, RunControl, measure_finals, measure_held_out
from searches.study.objective import MeasureSettings
from tests.searches.known import HELD_OUT, Known, lookup, run_known

NAMES = [item.id for item in HELD_OUT]
FAST, OTHER, THIRD = lookup(4), lookup(8), lookup(6)
PLAIN = SpeculativeConfig()
_CHANGED = Losslessness(1, (Divergence("x", 1, 9.0, 0.0),))


def _searched(bench: Known, *configs: SpeculativeConfig) -> optuna.Study:
    """Return a study that tried some configurations; the bench forgets it."""
    study = run_known(bench, *configs)
    bench.asked.clear()
    bench.comparisons.clear()
    bench.calls = 0
    return study


def _finals(
    study: optuna.Study, bench: Known, folder: Path | None = None, prompts: PromptSet = HELD_OUT, **settings: Any
) -> Finals:
    control = RunControl(folder, seconds_left=settings.pop("seconds_left", lambda: 1e9))
    chosen = MeasureSettings(**{"finalists": 3, "held_out_repeats": 1} | settings)
    return measure_finals(study, bench, prompts, chosen, 0, control)


def _by_place(speedups: Callable[[int], Mapping[SpeculativeConfig, float]]) -> Callable[..., Any]:
    return lambda name: speedups(NAMES.index(name) if name in NAMES else 0)


@pytest.mark.parametrize(("indifference", "asked"), [(None, [72, 72, 12]), (0.03, [12, 12, 12])])
def test_slower_finalists_are_dropped_and_the_simpler_wins_a_tie(indifference: float | None, asked: list[int]) -> None:
    """Ties are measured until the repeats are used up, or until neither can be much faster than the other."""
    bench = Known({FAST: 1.5, OTHER: 1.5, THIRD: 1.2})
    study = _searched(bench, FAST, OTHER, THIRD)
    finals = _finals(study, bench, held_out_repeats=3, indifference=indifference)
    assert [bench.count(config) for config in (FAST, OTHER, THIRD)] == asked
    assert all(names == NAMES for names, *_ in bench.comparisons)  # one for each repeat, as some drafters learn
    assert (finals.winner.config, finals.left_out) == (FAST, "")
    assert [finalist.config for finalist in finals.finalists if not finalist.stayed] == [THIRD]


@pytest.mark.usefixtures("a_second_a_row")
def test_earlier_finals_count_as_seconds_of_the_search(tmp_path: Path) -> None:
    bench = Known({FAST: 1.5, THIRD: 1.5})
    assert _finals(run_known(bench, FAST), bench, tmp_path).seconds == 24
    study = run_known(bench, FAST, THIRD)
    assert [_finals(study, bench, tmp_path).seconds for _ in range(2)] == [48, 48]
    assert _finals(study, bench).seconds == 24


def test_rows_of_another_head_or_machine_are_not_reused(tmp_path: Path) -> None:
    head, bench = tmp_path / "head", Known({})
    head.mkdir()
    expected = {SpeculativeConfig("eagle", 4, head=str(head)): 1.0}

    def measured() -> int:
        before = len(bench.asked)
        measure_held_out(expected, bench, HELD_OUT, MeasureSettings(), 0, RunControl(tmp_path / "log"))
        return len(bench.asked) - before

    for weights in (b"one", b"other"):
        (head / "pytorch_model.bin").write_bytes(weights)
        assert [measured(), measured()] == [24, 0]
    bench.conditions = "another machine"
    assert [measured(), measured()] == [24, 0]


def test_a_finalist_that_seems_slower_does_not_tie() -> None:
    """The complex one is much faster on some prompts and slower on others, so that intervals are wide."""
    often = 1.4
    bench = Known(_by_place(lambda place: {FAST: 1.5, OTHER: 3.0 if place % 4 == 0 else often}))
    study = run_known(bench, FAST, OTHER)
    finals = _finals(study, bench)
    assert finals.winner.config == OTHER
    rows = {finalist.config: finalist for finalist in finals.finalists}
    assert rows[FAST].held_out["speedup"] < 0.96 * rows[OTHER].held_out["speedup"]
    assert not rows[FAST].ties
    often = 1.29  # equal over all, within a hundredth
    assert _finals(study, bench).winner.config == FAST


@pytest.mark.parametrize(
    ("speedups", "repeats"), [((1.5, 1.5), 1), ((0.7, 1.5), 3), ((1.2, 2.0), 1), ((0.5, 0.8), 1), ((0.9, 0.9), 1)]
)
def test_the_last_finalist_is_measured_until_it_differs_from_plain_decoding(
    speedups: tuple[float, float], repeats: int
) -> None:
    bench = Known({FAST: 1.5, THIRD: 1.2})
    study = _searched(bench, FAST, THIRD)
    bench.speedups = _by_place(lambda place: {FAST: speedups[place % 2], THIRD: 0.3})
    _finals(study, bench, held_out_repeats=3)
    assert bench.count(FAST) == repeats * 24
    assert bench.count(THIRD) == 12


class _Stalling(Known):
    """Some decodings of plain decoding, by their number, take four times as long. One changes the others' output."""

    stalls: Collection[int] = ()
    changed: int | None = None

    def compare(self, *args: Any, **named: Any) -> Iterator[dict[str, Sample]]:
        for row in super().compare(*args, **named):
            seconds = row[BASELINE].decode_seconds * (4 if self.calls - 1 in self.stalls else 1)
            if self.calls - 1 == self.changed:
                row = {name: replace(each, lossless=_CHANGED) for name, each in row.items()}
            yield row | {BASELINE: replace(row[BASELINE], decode_seconds=seconds)}


@pytest.mark.parametrize(
    ("stalls", "left_out", "speedup"), [((15,), 1, 1.5), ((15, 18), 2, 1.5), ((15, 18, 20), 0, 1.5 * 33 / 24)]
)
def test_stalls_of_single_decodings_are_left_out_if_they_are_rare(
    stalls: Collection[int], left_out: int, speedup: float, tmp_path: Path
) -> None:
    """The mean over many finalists hides them; frequent ones may be the decoder's own."""
    configs = [lookup(length) for length in range(4, 10)]
    bench = _Stalling(dict.fromkeys(configs, 1.5))
    study = _searched(bench, *configs)
    bench.stalls = stalls
    finals = _finals(study, bench, tmp_path, finalists=6)
    assert finals.stalled == left_out
    assert [finalist.held_out["speedup"] for finalist in finals.finalists] == [pytest.approx(speedup)] * 6
    assert (f"because one decoding stalled: {left_out}." in report.summary(study, finals)) == (left_out > 0)
    bench.asked.clear()
    assert _finals(study, bench, tmp_path, finalists=6) == finals
    assert not bench.asked  # resumed finals measure nothing again


def test_outputs_are_compared_where_a_decoding_stalled() -> None:
    bench = _Stalling({FAST: 1.5})
    study = _searched(bench, FAST)
    bench.stalls, bench.changed = (15,), 15
    (found,) = _finals(study, bench).finalists
    assert found.held_out["losslessness"]["verdict"] == "different" and not found.eligible


def test_plain_decoding_wins_if_nothing_is_faster() -> None:
    bench = Known({FAST: 0.95})
    study = run_known(bench, FAST)
    bench.speedups = {FAST: 0.9}  # the search was lucky
    finals = _finals(study, bench)
    assert finals.winner.config == PLAIN
    text = report.summary(study, finals)
    assert report.verdict(finals).startswith("No drafting wins") and report.verdict(finals) in text
    assert f"The fastest finalist, {FAST.label()}:\nBy category: default 0.90 (0.90 to 0.90).\n" in text
    assert "Its speedup was 0.95 in the search and 0.90 on held-out prompts." in text
    assert "copies of weights" not in text
    held_out = finals.finalists[0].held_out | {"copies_bytes": 76_400_000}
    text = report.summary(study, replace(finals, finalists=(replace(finals.finalists[0], held_out=held_out),)))
    assert "Its draft reads copies of weights of 76 MB.\n" in text


def test_finals_without_time_measure_one_block_and_resume_with_the_same_rows(tmp_path: Path) -> None:
    bench = Known({FAST: 1.5, THIRD: 1.4})
    study = _searched(bench, FAST, THIRD)
    left = iter([1e9] * 9)  # seconds: for the choice of finalists and the rows after the first block
    finals = _finals(study, bench, tmp_path, seconds_left=lambda: next(left, 0.0))
    assert len(bench.asked) == 2 * 12 + 2  # the slower one is dropped after twelve
    assert finals.left_out == "Time ran out after 14 of 24 held-out decodings."
    assert finals.winner.config == FAST
    bench.asked.clear()
    assert _finals(study, bench, tmp_path, seconds_left=lambda: 0.0) == finals
    assert bench.asked == []
    (log,) = tmp_path.iterdir()
    log.write_bytes(log.read_bytes()[:-20])  # as after a kill
    assert _finals(study, bench, tmp_path).left_out == ""
    assert bench.asked == [(FAST, name) for name in NAMES[13:]]


def test_finals_with_little_time_measure_few_finalists_of_different_methods(tmp_path: Path) -> None:
    other = SpeculativeConfig("token_recycling")
    bench = Known({FAST: 1.5, THIRD: 1.49, other: 1.48})
    finals = _finals(run_known(bench, FAST, THIRD, other), bench, tmp_path, seconds_left=lambda: 1.2 * 16 * 2.5)
    assert {finalist.config for finalist in finals.finalists} == {FAST, other}
    assert finals.left_out == "2 of 3 finalists were measured, because time was short."


def test_finals_without_a_clear_winner_go_on_and_the_verdict_names_a_faster_one_that_may_not_win() -> None:
    bench = Known({FAST: 1.0}, drift=lambda call: 1 + 0.1 * (call % 3))
    finals = _finals(study := _searched(bench, FAST), bench, indifference=0.03)
    assert (len(bench.asked), finals.winner.config) == (24, PLAIN)
    bench.speedups = {FAST: 1.5}
    finals = _finals(study, bench)
    (found,) = finals.finalists
    changed = replace(found, held_out=found.held_out | {"losslessness": {"verdict": "different"}})
    verdict = report.verdict(replace(finals, finalists=(changed,)))
    assert verdict == f"No drafting wins: {FAST.label()} is faster, but its output differs from plain decoding."

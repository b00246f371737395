"""Finals on a bench with known speedups: dropped finalists, ties, the winner and its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from layerskip import AcceptRule, PromptSet, SpeculativeConfig
from layerskip.measure.losslessness import Divergence, Losslessness
from layerskip.measure.measurement import Sample
from layerskip.prompts import PromptItem
from searches.report import markdown as report
from searches.space.search_space import SearchSpace
from searches.study.finals import RunControl, measure_finals, measure_held_out
from searches.study.leaderboard import ranking
from searches.study.objective import MeasureSettings, Objective
from searches.study.study import StudySettings, run_trials
from tests.searches.known import HELD_OUT, Known, lookup, run_known


def test_slower_finalists_are_dropped_and_the_simpler_wins_a_tie() -> None:
    long, short, slow = lookup(8), lookup(4), lookup(6)
    bench = Known({long: 1.5, short: 1.5, slow: 1.2})
    study = run_known(bench, long, short, slow)
    bench.asked.clear()
    finals = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=3, held_out_repeats=3), 0)
    asked = {config: sum(found == config for found, _ in bench.asked) for config in (long, short, slow)}
    assert asked == {long: 72, short: 72, slow: 12}  # ties are measured until the repeats are used up
    assert finals.winner.config == short
    assert [finalist.config for finalist in finals.finalists if not finalist.stayed] == [slow]


@pytest.mark.usefixtures("a_second_a_row")
def test_earlier_finals_count_as_seconds_of_the_search(tmp_path: Path) -> None:
    first, second = lookup(4), lookup(6)
    bench = Known({first: 1.5, second: 1.5})
    study, settings = run_known(bench, first), MeasureSettings(finalists=2, held_out_repeats=1)
    assert measure_finals(study, bench, HELD_OUT, settings, 0, RunControl(tmp_path)).seconds == 24
    study = run_known(bench, first, second)
    assert [measure_finals(study, bench, HELD_OUT, settings, 0, RunControl(tmp_path)).seconds for _ in range(2)] == [48, 48]
    assert measure_finals(study, bench, HELD_OUT, settings, 0).seconds == 24


def test_rows_of_another_head_or_machine_are_not_reused(tmp_path: Path) -> None:
    head, bench = tmp_path / "head", Known({})
    head.mkdir()
    configs = {"head": SpeculativeConfig("eagle", 4, head=str(head))}

    def measured() -> int:
        before = len(bench.asked)
        measure_held_out(
            configs, {"head": 1.0}, bench, HELD_OUT, MeasureSettings(held_out_repeats=1), 0, RunControl(tmp_path / "log")
        )
        return len(bench.asked) - before

    for weights in (b"one", b"other"):
        (head / "pytorch_model.bin").write_bytes(weights)
        assert [measured(), measured()] == [24, 0]
    bench.conditions = "another machine"
    assert [measured(), measured()] == [24, 0]


def test_a_finalist_that_seems_slower_does_not_tie() -> None:
    """The complex one is much faster on some prompts and slower on others, so that intervals are wide."""
    simple, complex_ = lookup(4), lookup(8)

    class Mixed(Known):
        def compare(
            self, configs: Mapping[str, SpeculativeConfig], prompts: PromptSet, *rest: Any
        ) -> Iterator[dict[str, Sample]]:
            for number, item in enumerate(prompts):
                self.speedups = {simple: 1.5, complex_: 3.0 if number % 4 == 0 else self.speedup}
                yield from super().compare(configs, PromptSet((item,)), *rest)

        speedup = 1.4

    bench = Mixed({})
    study = run_known(bench, simple, complex_)
    settings = MeasureSettings(finalists=2, held_out_repeats=1)
    finals = measure_finals(study, bench, HELD_OUT, settings, 0)
    assert finals.winner.config == complex_
    rows = {finalist.config: finalist for finalist in finals.finalists}
    assert rows[simple].held_out["speedup"] < 0.96 * rows[complex_].held_out["speedup"]
    assert not rows[simple].ties
    bench.speedup = 1.29  # equal over all, within a hundredth
    assert measure_finals(study, bench, HELD_OUT, settings, 0).winner.config == simple


def test_measuring_ends_when_one_finalist_is_left() -> None:
    fast, slow = lookup(4), lookup(6)
    bench = Known({fast: 1.5, slow: 1.2})
    study = run_known(bench, fast, slow)
    bench.asked.clear()
    finals = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=2, held_out_repeats=3), 0)
    assert sum(found == fast for found, _ in bench.asked) == 24
    assert finals.winner.config == fast


@pytest.mark.parametrize(("speedups", "repeats"), [((0.7, 1.5), 3), ((1.2, 2.0), 1), ((0.5, 0.8), 1)])
def test_the_last_finalist_is_measured_until_it_differs_from_plain_decoding(
    speedups: tuple[float, float], repeats: int
) -> None:
    only = lookup(4)

    class Mixed(Known):
        def compare(
            self, configs: Mapping[str, SpeculativeConfig], prompts: PromptSet, *rest: Any
        ) -> Iterator[dict[str, Sample]]:
            for number, item in enumerate(prompts):
                self.speedups = {only: speedups[number % 2]}
                yield from super().compare(configs, PromptSet((item,)), *rest)

    bench = Mixed({only: 1.5})
    study = run_known(bench, only)
    bench.asked.clear()
    measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=1, held_out_repeats=3), 0)
    assert len(bench.asked) == repeats * 24


def test_trained_finalists_take_part() -> None:
    closed, trained = lookup(4), lookup(6)  # any two; no trial measured the second
    bench = Known({closed: 1.3, trained: 1.6})
    study = run_known(bench, closed)
    (entry,) = ranking(study)
    also = [replace(entry, config=trained)]
    finals = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=1, held_out_repeats=1), 0, also=also)
    assert finals.winner.config == trained
    assert {finalist.config for finalist in finals.finalists} == {closed, trained}


@pytest.mark.usefixtures("a_second_a_row")
def test_prompts_with_drift_are_measured_again(tmp_path: Path) -> None:
    fast = lookup(4)
    bench = Known({fast: 1.5})
    study = run_known(bench, fast)
    still = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=1, held_out_repeats=1), 0)
    assert "speed changed" not in report.summary(study, still)
    first = bench.calls
    bench.drift = lambda call: {first + 3: 1.5, first + 5: 0.5, first + 7: 1.2}.get(call, 1.0)
    bench.asked.clear()
    finals = measure_finals(
        study, bench, HELD_OUT, MeasureSettings(finalists=1, held_out_repeats=1), 0, RunControl(tmp_path)
    )
    names = [item.id for item in HELD_OUT]
    assert [name for _, name in bench.asked] == [*names, names[3], names[5]]
    assert (finals.drifted, finals.unsteady) == (2, 0)
    assert "changed on 2 held-out prompts, which were measured again." in report.summary(study, finals)
    assert (still.seconds, finals.seconds) == (24, 26)  # repeated measurements count
    assert finals.baseline["decode_seconds"] == pytest.approx(
        still.baseline["decode_seconds"] + 0.2
    )  # of the prompt within the tolerance
    bench.asked.clear()
    assert (
        measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=1, held_out_repeats=1), 0, RunControl(tmp_path))
        == finals
    )
    assert not bench.asked  # resumed finals measure nothing again
    first, bench.drift = bench.calls, lambda call: 1.5 if call in (first + 3, first + 24) else 1.0
    unsteady = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=1, held_out_repeats=1), 0)
    assert (unsteady.drifted, unsteady.unsteady) == (1, 1)
    assert "measured again; it changed again on 1." in report.summary(study, unsteady)


def test_learning_drafters_are_warmed_when_a_held_out_prompt_is_measured_again() -> None:
    asked = []

    class Watched(Known):
        def compare(
            self, configs: Mapping[str, SpeculativeConfig], prompts: PromptSet, repeats: int, seed: int, *rest: Any
        ) -> Iterator[dict[str, Sample]]:
            asked.append((len(prompts), seed, [item.id for item in rest[1]]))
            return super().compare(configs, prompts, repeats, seed, *rest)

    bench = Watched({lookup(4): 1.5, lookup(5): 1.5})
    study = run_known(bench, lookup(4), lookup(5))
    first, names = bench.calls, [item.id for item in HELD_OUT]
    bench.drift = lambda call: 2.0 if call == first + 24 + 7 else 1.0  # in the second repeat
    asked.clear()
    measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=2, held_out_repeats=2), 0)
    (_, _, _), (_, begin, _), again = asked
    assert again == (1, begin + 7, names[1:7])  # as many as before a trial; seeds count up prompt by prompt


def test_long_prompts_are_not_drift() -> None:
    class Longer(Known):
        """Each prompt is longer than the one before, and takes longer to prefill and to decode."""

        @staticmethod
        def _sample(item: PromptItem, seconds: float) -> Sample:
            longer = int(item.id.split()[-1]) / 12
            sample = Known._sample(item, seconds)
            return replace(sample, prefill_seconds=0.1 + longer, decode_seconds=seconds * (1 + longer))

    fast = lookup(4)
    bench = Longer({fast: 1.5})
    prompts = PromptSet(tuple(replace(item, id=f"held-out {place}") for place, item in enumerate(HELD_OUT)))
    study = run_known(Known({fast: 1.5}), fast)
    assert measure_finals(study, bench, prompts, MeasureSettings(finalists=1, held_out_repeats=1), 0).drifted == 0
    first = bench.calls
    bench.drift = lambda call: 2.0 if call == first + 3 else 1.0
    assert measure_finals(study, bench, prompts, MeasureSettings(finalists=1, held_out_repeats=1), 0).drifted == 1


def test_plain_decoding_wins_if_nothing_is_faster() -> None:
    bench = Known({lookup(4): 0.95})
    study = run_known(bench, lookup(4))
    bench.speedups = {lookup(4): 0.9}  # the search was lucky
    finals = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=1, held_out_repeats=1), 0)
    assert finals.winner.config == SpeculativeConfig()
    text = report.summary(study, finals)
    assert report.verdict(finals).startswith("No drafting wins") and report.verdict(finals) in text
    assert f"The fastest finalist, {lookup(4).label()}:\nBy category: default 0.90 (0.90 to 0.90).\n" in text
    assert "Its speedup was 0.95 in the search and 0.90 on held-out prompts." in text


def test_the_verdict_names_a_faster_finalist_that_may_not_win() -> None:
    fast = lookup(4)
    bench = Known({fast: 1.5})
    study = run_known(bench, fast)
    finals = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=1, held_out_repeats=1), 0)
    (found,) = finals.finalists
    changed = replace(found, held_out=found.held_out | {"losslessness": {"verdict": "different"}})
    verdict = report.verdict(replace(finals, finalists=(changed,)))
    assert verdict == f"No drafting wins: {fast.label()} is faster, but its output differs from plain decoding."


def test_finalists_that_are_surely_slower_than_plain_decoding_are_not_repeated() -> None:
    bench = Known({lookup(4): 0.9, lookup(6): 0.9})
    study = run_known(bench, lookup(4), lookup(6))
    bench.calls = 0
    settings = MeasureSettings(finalists=2, held_out_repeats=3)
    assert measure_finals(study, bench, HELD_OUT, settings, 0).winner.config == SpeculativeConfig()
    once = bench.calls
    bench.speedups = {lookup(4): 1.2, lookup(6): 1.2}
    assert measure_finals(study, bench, HELD_OUT, settings, 0).winner.config == lookup(4)
    assert bench.calls == 4 * once  # equal and faster finalists are decoded three times


def test_slower_finalists_are_tested_for_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test after every block would drop finalists by chance if there are many prompts."""
    fast, close = lookup(4), lookup(6)
    tests = []
    monkeypatch.setattr("searches.study.finals._is_slower_than_leader", lambda rows, configs, name: tests.append(len(rows)))
    bench = Known({fast: 1.5, close: 1.5})
    many = PromptSet.of([f"held-out {i}" for i in range(70)])
    study = run_known(bench, fast, close)
    measure_finals(study, bench, many, MeasureSettings(finalists=2, held_out_repeats=2), 0)
    assert list(dict.fromkeys(tests)) == [12, 18, 24, 30, 42, 54, 70, 88, 112, 140]


def test_learning_drafters_keep_what_they_learn_over_all_prompts() -> None:
    """All held-out prompts are one comparison, from which slower finalists are dropped."""
    compared: list[list[str]] = []

    class Watched(Known):
        def compare(
            self, configs: Mapping[str, SpeculativeConfig], prompts: PromptSet, *rest: Any
        ) -> Iterator[dict[str, Sample]]:
            compared.append([item.id for item in prompts])
            return super().compare(configs, prompts, *rest)

    fast, slow = lookup(4), lookup(6)
    bench = Watched({fast: 1.5, slow: 1.2})
    many = PromptSet.of([f"held-out {i}" for i in range(30)])
    study = run_known(bench, fast, slow)
    compared.clear()
    bench.asked.clear()
    finals = measure_finals(study, bench, many, MeasureSettings(finalists=2, held_out_repeats=1), 0)
    assert compared == [[item.id for item in many]]
    assert finals.winner.config == fast
    assert [sum(config == asked for asked, _ in bench.asked) for config in (fast, slow)] == [30, 12]


class _Changing(Known):
    """Lossy configurations change every output."""

    def compare(
        self, configs: Mapping[str, SpeculativeConfig], prompts: PromptSet, *rest: Any
    ) -> Iterator[dict[str, Sample]]:
        for row in super().compare(configs, prompts, *rest):
            changed = Losslessness(1, (Divergence("x", 1, 9.0, 0.0),))
            lossy = {name: row[name].with_losslessness(changed) for name, config in configs.items() if not config.lossless}
            yield row | lossy


@pytest.mark.parametrize("allowed", [True, False])
def test_a_lossy_configuration_wins_only_if_allowed(allowed: bool) -> None:
    exact, lossy = lookup(4), replace(lookup(4), accept=AcceptRule("threshold", 0.25))
    bench = _Changing({exact: 1.2, lossy: 2.0})
    space = SearchSpace(bench.layers, methods=["none", "prompt_lookup"], allow_lossy=allowed)
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())
    for config in (exact, lossy):
        study.enqueue_trial(space.params(config))
    objective = Objective(bench, space, HELD_OUT, MeasureSettings(prompts=3), seed=0)
    run_trials(study, objective, StudySettings(n_trials=2, remeasure=100), lambda trial: None)
    finals = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=2, held_out_repeats=1), 0)
    assert finals.winner.config == (lossy if allowed else exact)
    assert ("output LOSSY" in report.verdict(finals)) == allowed


def test_finals_end_once_the_winner_is_clear() -> None:
    """The two that tie are measured no further with indifference, since neither can be much faster than the other."""
    long, short, slow = lookup(8), lookup(4), lookup(6)
    bench = Known({long: 1.5, short: 1.5, slow: 1.2})
    study = run_known(bench, long, short, slow)
    bench.asked.clear()
    settings = MeasureSettings(finalists=3, held_out_repeats=3, indifference=0.03)
    finals = measure_finals(study, bench, HELD_OUT, settings, 0)
    assert len(bench.asked) == 3 * 12
    assert finals.winner.config == short
    assert finals.left_out == ""


def test_finals_without_a_clear_winner_go_on() -> None:
    level = lookup(4)
    bench = Known({level: 1.0}, drift=lambda call: 1 + 0.1 * (call % 3))
    study = run_known(bench, level)
    bench.asked.clear()
    finals = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=1, indifference=0.03), 0)
    assert len(bench.asked) == 24
    assert finals.winner.config == SpeculativeConfig()


def test_finals_without_time_measure_one_block_and_resume_with_the_same_rows(tmp_path: Path) -> None:
    first, second = lookup(4), lookup(6)
    bench = Known({first: 1.5, second: 1.4})
    study = run_known(bench, first, second)
    bench.asked.clear()
    left = iter([1e9] * 9)  # seconds: for the choice of finalists and the rows after the first block
    settings = MeasureSettings(finalists=2, held_out_repeats=1)
    finals = measure_finals(study, bench, HELD_OUT, settings, 0, RunControl(tmp_path, seconds_left=lambda: next(left, 0.0)))
    assert len(bench.asked) == 2 * 12 + 2  # the slower one is dropped after twelve
    assert finals.left_out == "Time ran out after 14 of 24 held-out decodings."
    assert finals.winner.config == first
    bench.asked.clear()
    assert measure_finals(study, bench, HELD_OUT, settings, 0, RunControl(tmp_path, seconds_left=lambda: 0.0)) == finals
    assert bench.asked == []


def test_finals_with_little_time_measure_few_finalists_of_different_methods(tmp_path: Path) -> None:
    first, second, other = lookup(4), lookup(6), SpeculativeConfig("token_recycling")
    bench = Known({first: 1.5, second: 1.49, other: 1.48})
    study = run_known(bench, first, second, other)
    settings = MeasureSettings(finalists=3, held_out_repeats=1)
    finals = measure_finals(study, bench, HELD_OUT, settings, 0, RunControl(tmp_path, seconds_left=lambda: 1.2 * 16 * 2.5))
    assert {finalist.config for finalist in finals.finalists} == {first, other}
    assert finals.left_out == "2 of 3 finalists were measured, because time was short."

"""The verdict on a bench whose every pace is known: who leaves, who ties, who wins, and what the report says of it."""

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
from searches.report import study_report as report
from searches.space.search_space import SearchSpace
from searches.study.finals import compete, measure_finals
from searches.study.leaderboard import ranking
from searches.study.objective import MeasureSettings, Objective
from searches.study.study import StudySettings, run_trials
from tests.searches.known import HELD_OUT, Known, lookup, run_known


def test_who_is_behind_leaves_and_a_tie_goes_to_the_simpler() -> None:
    long, short, slow = lookup(8), lookup(4), lookup(6)
    bench = Known({long: 1.5, short: 1.5, slow: 1.2})
    study = run_known(bench, long, short, slow)
    bench.asked.clear()
    finals = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=3, held_out_repeats=3), 0)
    asked = {config: sum(found == config for found, _ in bench.asked) for config in (long, short, slow)}
    assert asked == {long: 72, short: 72, slow: 12}  # ties are measured to the end of the budget
    assert finals.winner.config == short
    assert [finalist.config for finalist in finals.finalists if not finalist.stayed] == [slow]


@pytest.mark.usefixtures("a_second_a_row")
def test_finals_of_fewer_trials_were_spent_too(tmp_path: Path) -> None:
    first, second = lookup(4), lookup(6)
    bench = Known({first: 1.5, second: 1.5})
    study, settings = run_known(bench, first), MeasureSettings(finalists=2)
    assert measure_finals(study, bench, HELD_OUT, settings, 0, tmp_path).seconds == 24
    study = run_known(bench, first, second)
    assert [measure_finals(study, bench, HELD_OUT, settings, 0, tmp_path).seconds for _ in range(2)] == [48, 48]
    assert measure_finals(study, bench, HELD_OUT, settings, 0).seconds == 24


def test_what_was_kept_of_another_head_or_machine_is_not_taken_for_this_one(tmp_path: Path) -> None:
    head, bench = tmp_path / "head", Known({})
    head.mkdir()
    configs = {"head": SpeculativeConfig("eagle", 4, head=str(head))}

    def measured() -> int:
        before = len(bench.asked)
        compete(configs, {"head": 1.0}, bench, HELD_OUT, MeasureSettings(), 0, tmp_path / "kept")
        return len(bench.asked) - before

    for weights in (b"one", b"other"):
        (head / "pytorch_model.bin").write_bytes(weights)
        assert [measured(), measured()] == [24, 0]
    bench.conditions = "another machine"
    assert [measured(), measured()] == [24, 0]


def test_what_seems_a_tenth_slower_does_not_tie_though_prompts_cannot_tell() -> None:
    """Where the complex one is faster by a factor on some prompts, and slower on the others."""
    simple, complex_ = lookup(4), lookup(8)

    class Mixed(Known):
        def compare(
            self, configs: Mapping[str, SpeculativeConfig], prompts: PromptSet, *rest: Any
        ) -> Iterator[dict[str, Sample]]:
            for number, item in enumerate(prompts):
                self.speedups = {simple: 1.5, complex_: 3.0 if number % 4 == 0 else self.pace}
                yield from super().compare(configs, PromptSet((item,)), *rest)

        pace = 1.4

    bench = Mixed({})
    study = run_known(bench, simple, complex_)
    settings = MeasureSettings(finalists=2)
    finals = measure_finals(study, bench, HELD_OUT, settings, 0)
    assert finals.winner.config == complex_
    rows = {finalist.config: finalist for finalist in finals.finalists}
    assert rows[simple].held_out["speedup"] < 0.96 * rows[complex_].held_out["speedup"]
    assert not rows[simple].ties
    bench.pace = 1.29  # as fast in all, within a hundredth
    assert measure_finals(study, bench, HELD_OUT, settings, 0).winner.config == simple


def test_measuring_ends_once_one_is_left() -> None:
    fast, slow = lookup(4), lookup(6)
    bench = Known({fast: 1.5, slow: 1.2})
    study = run_known(bench, fast, slow)
    bench.asked.clear()
    finals = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=2, held_out_repeats=3), 0)
    assert sum(found == fast for found, _ in bench.asked) == 24
    assert finals.winner.config == fast


@pytest.mark.parametrize(("speedups", "turns"), [((0.7, 1.5), 3), ((1.2, 2.0), 1), ((0.5, 0.8), 1)])
def test_one_that_is_left_is_measured_until_it_is_told_from_plain_decoding(
    speedups: tuple[float, float], turns: int
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
    assert len(bench.asked) == turns * 24


def test_who_was_trained_since_takes_part_as_well() -> None:
    closed, trained = lookup(4), lookup(6)  # any two, of which no trial was about the second
    bench = Known({closed: 1.3, trained: 1.6})
    study = run_known(bench, closed)
    (entry,) = ranking(study)
    also = [replace(entry, config=trained)]
    finals = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=1), 0, also=also)
    assert finals.winner.config == trained
    assert {finalist.config for finalist in finals.finalists} == {closed, trained}


@pytest.mark.usefixtures("a_second_a_row")
def test_prompts_on_which_the_machine_moved_are_measured_again(tmp_path: Path) -> None:
    fast = lookup(4)
    bench = Known({fast: 1.5})
    study = run_known(bench, fast)
    still = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=1), 0)
    assert "pace moved" not in report.summary(study, still)
    first = bench.calls
    bench.drift = lambda call: {first + 3: 1.5, first + 5: 0.5, first + 7: 1.2}.get(call, 1.0)
    bench.asked.clear()
    finals = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=1), 0, tmp_path)
    names = [item.id for item in HELD_OUT]
    assert [name for _, name in bench.asked] == [*names, names[3], names[5]]
    assert (finals.drifted, finals.unsteady) == (2, 0)
    assert "moved on 2 held-out prompts, which were measured again." in report.summary(study, finals)
    assert (still.seconds, finals.seconds) == (24, 26)  # what was measured again was measured, too
    assert finals.baseline["decode_seconds"] == pytest.approx(still.baseline["decode_seconds"] + 0.2)  # of the one within
    bench.asked.clear()
    assert measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=1), 0, tmp_path) == finals
    assert not bench.asked  # an interrupted verdict measures nothing a third time
    first, bench.drift = bench.calls, lambda call: 1.5 if call in (first + 3, first + 24) else 1.0
    unsteady = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=1), 0)
    assert (unsteady.drifted, unsteady.unsteady) == (1, 1)
    assert "measured again; it still did on 1." in report.summary(study, unsteady)


def test_who_learns_knows_as_much_when_a_held_out_prompt_is_measured_again() -> None:
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
    assert again == (1, begin + 7, names[1:7])  # as many as warm a trial; draws are seeded prompt by prompt


def test_long_prompts_are_not_taken_for_a_slow_machine() -> None:
    class Longer(Known):
        """Every prompt is longer than the one before it, and takes as much longer to prefill and to decode."""

        @staticmethod
        def _sample(item: PromptItem, seconds: float) -> Sample:
            longer = int(item.id.split()[-1]) / 12
            sample = Known._sample(item, seconds)
            return replace(sample, prefill_seconds=0.1 + longer, decode_seconds=seconds * (1 + longer))

    fast = lookup(4)
    bench = Longer({fast: 1.5})
    prompts = PromptSet(tuple(replace(item, id=f"held-out {place}") for place, item in enumerate(HELD_OUT)))
    study = run_known(Known({fast: 1.5}), fast)
    assert measure_finals(study, bench, prompts, MeasureSettings(finalists=1), 0).drifted == 0
    first = bench.calls
    bench.drift = lambda call: 2.0 if call == first + 3 else 1.0
    assert measure_finals(study, bench, prompts, MeasureSettings(finalists=1), 0).drifted == 1


def test_nobody_wins_who_is_not_faster() -> None:
    bench = Known({lookup(4): 0.95})
    study = run_known(bench, lookup(4))
    bench.speedups = {lookup(4): 0.9}  # luck, in the search
    finals = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=1), 0)
    assert finals.winner.config == SpeculativeConfig()
    text = report.summary(study, finals)
    assert report.verdict(finals).startswith("No drafting wins") and report.verdict(finals) in text
    assert f"The fastest finalist, {lookup(4).label()}:\nBy kind of work: default 0.90 (0.90 to 0.90).\n" in text
    assert "its speedup went from 0.95 to 0.90" in text


def test_the_verdict_names_what_is_faster_and_may_not_win() -> None:
    fast = lookup(4)
    bench = Known({fast: 1.5})
    study = run_known(bench, fast)
    finals = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=1), 0)
    (found,) = finals.finalists
    changed = replace(found, held_out=found.held_out | {"losslessness": {"verdict": "different"}})
    said = report.verdict(replace(finals, finalists=(changed,)))
    assert said == f"No drafting wins: {fast.label()} is faster, but its output is not that of plain decoding."


def test_nobody_is_decoded_again_whom_plain_decoding_surely_beats() -> None:
    bench = Known({lookup(4): 0.9, lookup(6): 0.9})
    study = run_known(bench, lookup(4), lookup(6))
    bench.calls = 0
    settings = MeasureSettings(finalists=2, held_out_repeats=3)
    assert measure_finals(study, bench, HELD_OUT, settings, 0).winner.config == SpeculativeConfig()
    once = bench.calls
    bench.speedups = {lookup(4): 1.2, lookup(6): 1.2}
    assert measure_finals(study, bench, HELD_OUT, settings, 0).winner.config == lookup(4)
    assert bench.calls == 4 * once  # who is level, and faster, is decoded three times


def test_looks_become_rarer_as_prompts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking after every block would let chance end a race of many prompts."""
    fast, close = lookup(4), lookup(6)
    looks = []
    monkeypatch.setattr("searches.study.finals._is_behind", lambda rows, configs, name: looks.append(len(rows)))
    bench = Known({fast: 1.5, close: 1.5})
    many = PromptSet.of([f"held-out {i}" for i in range(70)])
    study = run_known(bench, fast, close)
    measure_finals(study, bench, many, MeasureSettings(finalists=2, held_out_repeats=2), 0)
    assert list(dict.fromkeys(looks)) == [12, 18, 24, 30, 42, 54, 70, 88, 112, 140]


def test_who_learns_goes_on_learning_over_all_prompts() -> None:
    """One comparison for all held-out prompts, which whoever is far behind leaves."""
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
    finals = measure_finals(study, bench, many, MeasureSettings(finalists=2), 0)
    assert compared == [[item.id for item in many]]
    assert finals.winner.config == fast
    assert [sum(config == asked for asked, _ in bench.asked) for config in (fast, slow)] == [30, 12]


class _Changing(Known):
    """What is lossy changes every output."""

    def compare(
        self, configs: Mapping[str, SpeculativeConfig], prompts: PromptSet, *rest: Any
    ) -> Iterator[dict[str, Sample]]:
        for row in super().compare(configs, prompts, *rest):
            changed = Losslessness(1, (Divergence("x", 1, 9.0, 0.0),))
            lossy = {name: row[name].judged(changed) for name, config in configs.items() if not config.lossless}
            yield row | lossy


@pytest.mark.parametrize("allowed", [True, False])
def test_what_changes_the_output_wins_only_where_it_is_allowed(allowed: bool) -> None:
    exact, lossy = lookup(4), replace(lookup(4), accept=AcceptRule("threshold", 0.25))
    bench = _Changing({exact: 1.2, lossy: 2.0})
    space = SearchSpace(bench.layers, kinds=["none", "prompt_lookup"], allow_lossy=allowed)
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())
    for config in (exact, lossy):
        study.enqueue_trial(space.params(config))
    objective = Objective(bench, space, HELD_OUT, MeasureSettings(prompts=3), seed=0)
    run_trials(study, objective, StudySettings(n_trials=2, remeasure=100), lambda trial: None)
    finals = measure_finals(study, bench, HELD_OUT, MeasureSettings(finalists=2), 0)
    assert finals.winner.config == (lossy if allowed else exact)
    assert ("output LOSSY" in report.verdict(finals)) == allowed

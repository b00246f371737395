"""``report.md``: sentences of studies with known speedups, and tables of throughput and latency."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import optuna
import pytest
from optuna.trial import FrozenTrial, create_trial

from layerskip import PromptSet, SpeculativeConfig
from searches.predict.stability import SeedStability, Stability
from searches.report import markdown as report
from searches.report.tables import pareto_front
from searches.study.finals import measure_finals
from searches.study.objective import MEASURING_SECONDS, MeasureSettings
from tests.searches.known import HELD_OUT, Known, lookup, run_known


@pytest.mark.usefixtures("a_second_a_row")
def test_the_report_states_the_speedup_and_the_cost_of_the_search() -> None:
    fast = lookup(4)
    bench = Known({fast: 1.5})
    study = run_known(bench, fast)
    bench.speedups = {fast: 1.25}  # the search was lucky
    categories = ["two"] * 2 + ["three"] * 3 + ["many"] * 19
    prompts = PromptSet(tuple(replace(item, category=name) for item, name in zip(HELD_OUT, categories, strict=True)))
    finals = measure_finals(study, bench, prompts, MeasureSettings(finalists=1, held_out_repeats=1), 0)
    text = report.summary(study, finals, Stability(0.5, 0.25, 0.125), SeedStability(3, 0.75, 0.0625))
    assert "(95 % interval 1.25 to 1.25)" in report.verdict(finals)
    seconds = report.search_seconds(study, finals)
    assert finals.seconds == 24
    # Plain decoding takes 0.1 seconds a token, the winner 0.08.
    assert f"{seconds:.0f} seconds. {seconds / 0.02:,.0f} generated tokens pay it back." in text
    assert "Its speedup was 1.50 in the search and 1.25 on held-out prompts." in text
    assert "By category: many 1.25 (1.25 to 1.25), three 1.25 (1.25 to 1.25), two 1.25." in text  # two have no interval
    assert "50% of resampled text sets choose the same scanned mask. Two choices share 0.25 of what they skip" in text
    assert "The best masks of 3 seeds share 0.75 of what they skip; random masks share 0.06." in text


def test_the_report_leaves_out_trials_that_were_not_run() -> None:
    fast, slow = lookup(4), lookup(6)
    study = run_known(Known({fast: 1.5, slow: 1.2}), fast, slow, slow, slow)
    assert ["measurement" in trial.user_attrs for trial in study.trials] == [True, True, True, False]
    shown = [line.split("|")[1].strip() for line in report.summary(study, None).splitlines() if line.startswith("| ")]
    assert shown == ["trial", "0", "1", "2"]
    assert "4 trials: 0 stopped early, 1 not run (1 measured before)." in report.summary(study, None)


def test_start_up_and_scans_are_stated_where_there_were_any() -> None:
    study = run_known(Known({lookup(4): 1.5, lookup(6): 1.2}), lookup(4), lookup(6), lookup(8))
    assert "compiling" not in report.summary(study, None)
    other = optuna.create_study(direction="maximize")
    for trial, seconds in zip(study.trials, (30.0, 2.0, None), strict=True):
        metrics = {} if seconds is None else {"metrics": {"startup_seconds": seconds}}
        trial.user_attrs = trial.user_attrs | metrics | {"seconds": 10.0, MEASURING_SECONDS: 4.0}
        other.add_trial(trial)
    text = report.summary(other, None, scan_seconds=0.5)
    assert "2 trials began with 16.0 seconds of compiling" in text
    assert "took 0.5 seconds: 64 cost as much as 8.0 whole trials" in text


def test_the_front_is_what_no_other_point_exceeds() -> None:
    source = random.Random(3)
    points = {n: (float(source.randint(0, 9)), float(source.randint(1, 9))) for n in range(40)}
    front = pareto_front(points | {40: (99.0, None), 41: (None, 0.1)})
    for name, (more, less) in points.items():
        exceeded = any(a >= more and b <= less and (a, b) != (more, less) for a, b in points.values())
        assert (name in front) == (not exceeded)
    assert all(points[one][0] >= points[other][0] for one, other in itertools.pairwise(front))


def _trial(number: int, lossless: str, metrics: dict[str, float]) -> FrozenTrial:
    attributes = {
        "config": SpeculativeConfig("prompt_lookup", number).to_dict(),
        "measurement": {"losslessness": {"verdict": lossless}},
        "metrics": metrics,
    }
    trial = create_trial(value=1.0, user_attrs=attributes)
    trial.number = number
    return trial


def _load(concurrency: int, throughput: float, seconds: float) -> dict[str, float]:
    return {f"throughput_at_{concurrency}": throughput, f"tpot_p50_at_{concurrency}": seconds}


def test_each_number_of_requests_has_a_table() -> None:
    trials = [
        _trial(1, "exact", _load(1, 10.0, 0.1) | _load(8, 30.0, 0.3)),
        _trial(2, "exact", _load(1, 9.0, 0.2) | _load(8, 20.0, 0.2)),
        _trial(3, "different", _load(1, 99.0, 0.01)),
        _trial(4, "exact", {}),
    ]
    shown = [line for line in report.request_tables(trials) if line.startswith(("## ", "| 1", "| 2", "| 3", "| 4"))]
    assert [line.split(" | ")[0].split(", ")[-1] for line in shown] == [
        "1 requests in flight (Pareto front)", "| 1", "8 requests in flight (Pareto front)", "| 1", "| 2"
    ]  # fmt: skip
    assert report.request_tables([trials[3]]) == []

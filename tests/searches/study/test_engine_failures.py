"""An engine that cannot run a configuration: trials fail with the reason, finals go on without it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import optuna
import pytest
from optuna.trial import TrialState

from layerskip import Measurement, PromptSet, Sampling, SpeculativeConfig
from layerskip.measure.measurement import Sample
from searches.backends.backend import BASELINE, BackendError, Load
from searches.report import page_tables
from searches.report import study_report as report
from searches.study.bench import ModelBench
from searches.study.finals import measure_finals
from searches.study.leaderboard import ranking
from searches.study.objective import MeasureSettings
from tests.searches.known import HELD_OUT, PROMPTS, Known, lookup, run_known


@dataclass
class Failing(Known):
    """Some configurations fail, by name, after so many prompts of a comparison."""

    fails: Collection[SpeculativeConfig] = ()
    after: int = 0
    attempts: int = 0

    def compare(
        self, configs: Mapping[str, SpeculativeConfig], prompts: PromptSet, *rest: Any
    ) -> Iterator[dict[str, Sample]]:
        broken = [name for name, config in {BASELINE: SpeculativeConfig(), **configs}.items() if config in self.fails]
        if not broken:
            yield from super().compare(configs, prompts, *rest)
            return
        self.attempts += 1
        if self.after:
            yield from super().compare(configs, PromptSet(prompts.items[: self.after]), *rest)
        raise BackendError("out of memory\nat layer 3", "one\ntwo", "" if BASELINE in broken else broken[0])


def test_a_failed_trial_keeps_its_reason_and_is_tried_twice() -> None:
    bad, good = lookup(8), lookup(4)
    bench = Failing({good: 1.5}, fails=[bad])
    study = run_known(bench, bad, good, bad, bad, lookup(6))
    first, kept, second, third, last = study.trials
    for trial in (first, second):
        assert trial.state == TrialState.PRUNED
        assert trial.user_attrs["reason"] == "the engine failed: out of memory at layer 3"
        assert trial.user_attrs["engine_log"] == "one\ntwo"
        assert trial.constraints["out_of_memory"] > 0
    assert third.user_attrs["reason"] == "the engine failed 2 times before"
    assert bench.attempts == 2
    assert kept.state == last.state == TrialState.COMPLETE
    assert kept.constraints["out_of_memory"] <= 0
    assert ranking(study)[0].config == good
    assert bad not in [entry.config for entry in ranking(study)]
    text = report.summary(study, None)
    assert "5 trials: 0 stopped early, 3 not run (3 the engine failed)." in text
    assert "- 0: the engine failed: out of memory at layer 3\n" in text


def test_rows_before_a_failure_do_not_rank_a_configuration() -> None:
    bad = lookup(8)
    study = run_known(Failing({bad: 9.0}, fails=[bad], after=2), lookup(4), bad)
    assert study.trials[1].user_attrs["measurement"]["prompts"] == 2
    assert [entry.config for entry in ranking(study)] == [lookup(4)]


def test_an_engine_that_runs_nothing_ends_the_study() -> None:
    configs = [lookup(length) for length in (4, 6, 8)]
    bench = Failing({}, fails=[SpeculativeConfig()])
    with pytest.raises(BackendError, match=r"^backend: out of memory at layer 3$"):
        run_known(bench, *configs)
    assert bench.attempts == 3


@pytest.mark.parametrize("after", [0, 7])
def test_a_finalist_that_fails_is_dropped(after: int, tmp_path: Path) -> None:
    best, other = lookup(8), lookup(4)
    bench = Failing({best: 1.8, other: 1.5}, after=after)
    study = run_known(bench, best, other)
    bench.fails = [best]
    bench.asked.clear()
    settings = MeasureSettings(finalists=2, held_out_repeats=2)
    finals = measure_finals(study, bench, HELD_OUT, settings, 0, tmp_path)
    assert finals.winner.config == other
    (failed,) = [finalist for finalist in finals.finalists if finalist.config == best]
    assert not failed.stayed and not failed.eligible
    assert failed.held_out["prompts"] == after
    assert bench.attempts == 1
    assert [item for config, item in bench.asked if config == other][:24] == [item.id for item in HELD_OUT]
    assert best.label() in report.summary(study, finals)
    bench.asked.clear()
    assert measure_finals(study, bench, HELD_OUT, settings, 0, tmp_path) == finals
    assert not bench.asked


def test_finals_end_if_plain_decoding_fails() -> None:
    bench = Failing({lookup(4): 1.5})
    study = run_known(bench, lookup(4))
    bench.fails = [SpeculativeConfig()]
    with pytest.raises(BackendError):
        measure_finals(study, bench, HELD_OUT, MeasureSettings(), 0)


class _Engine:
    """A back end with the samples of a bench."""

    name: ClassVar[str] = "engine"
    exact = False

    def __init__(self, bench: Known) -> None:
        self.bench = bench

    def describe(self) -> dict[str, Any]:
        return {"version": 1}

    def compare(self, configs: Any, prompts: PromptSet, task: Any, load: Load, repeats: int, *rest: Any) -> Any:
        return self.bench.compare(configs, prompts, repeats, task.seed, *rest)


def test_throughput_compares_whole_requests() -> None:
    config, engine = lookup(4), _Engine(Known({lookup(4): 2.0}))
    benches = {goal: ModelBench(engine, Sampling(), 11, Load(8, goal)) for goal in ("decoding", "throughput")}  # type: ignore[arg-type]
    measured = {
        goal: Measurement.of(bench.compare({"candidate": config}, PROMPTS, 1, 0), BASELINE, "candidate")
        for goal, bench in benches.items()
    }
    assert measured["decoding"].speedup == pytest.approx(2.0)
    # A request of 11 tokens takes 1.1 seconds plainly, of which 0.1 are the prefill, and 0.6 with drafts.
    assert measured["throughput"].speedup == pytest.approx(1.1 / 0.6)
    assert measured["throughput"].baseline_tokens_per_second == pytest.approx(10.0)
    assert benches["decoding"].conditions != benches["throughput"].conditions


def test_the_report_lists_trials_that_none_exceeds_in_throughput_and_latency() -> None:
    study = run_known(Known({lookup(4): 1.5, lookup(6): 1.4, lookup(8): 1.3}), lookup(4), lookup(6), lookup(8))
    assert "Pareto" not in report.summary(study, None)
    figures = [(100.0, 0.02), (90.0, 0.03), (80.0, 0.01)]  # the second is behind the first in both
    other = optuna.create_study(direction="maximize")
    for trial, (throughput, seconds) in zip(study.trials, figures, strict=True):
        attributes = trial.user_attrs | {"figures": {"throughput": throughput, "tpot_p50": seconds}}
        other.add_trial(optuna.trial.create_trial(value=trial.value, user_attrs=attributes))
    table = report.summary(other, None).partition("Pareto front")[2]
    assert "| 0 | " in table and "| 2 | " in table and "| 1 | " not in table


class _Loaded(Known):
    """A bench that reports the throughput of each name in its last comparison, as an engine under load does."""

    def compare(self, configs: Mapping[str, SpeculativeConfig], *rest: Any) -> Iterator[dict[str, Sample]]:
        self.compared = configs
        return super().compare(configs, *rest)

    def figures(self) -> dict[str, float]:
        alone = len(self.compared) == 1
        rates = {name: 10.0 * self.speedups[config] for name, config in self.compared.items()}
        return {f"{'' if alone else f'{name}_'}throughput_at_8": rate for name, rate in rates.items()} | {
            "baseline_throughput_at_8": 10.0
        }


def test_finals_keep_the_throughput_of_each_finalist_and_of_plain_decoding_beside_it(tmp_path: Path) -> None:
    fast, slow = lookup(8), lookup(4)
    bench = _Loaded({fast: 1.8, slow: 1.2})
    study = run_known(bench, fast, slow)
    settings = MeasureSettings(finalists=2, held_out_repeats=2)  # the slower one is dropped before the second repeat
    finals = measure_finals(study, bench, HELD_OUT, settings, 0, tmp_path)
    found = {finalist.config: finalist.held_out["figures"] for finalist in finals.finalists}
    assert found == {
        fast: {"throughput_at_8": 18.0, "baseline_throughput_at_8": 10.0},
        slow: {"throughput_at_8": 12.0, "baseline_throughput_at_8": 10.0},
    }
    assert finals.baseline["figures"]["throughput_at_8"] == 10.0
    table = report.summary(study, finals).partition("Throughput and latency, 8 requests in flight (held-out prompts)")[2]
    assert f"| {fast.label()} | 18 |" in table and "| no drafting | 10 |" in table
    assert '<td data-name="throughput">18.0</td>' in page_tables.finals_table(finals)
    bench.compared = {"0": slow}  # a later comparison; the resumed finals decode nothing
    assert measure_finals(study, bench, HELD_OUT, settings, 0, tmp_path) == finals

"""An engine that cannot run a configuration: trials fail with the reason, finals go on without it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.trial import TrialState

from layerskip import Measurement, PromptSet, Sampling, SpeculativeConfig, UnsupportedModel
from layerskip.measure.measurement import Request, Sample
from searches.backends.backend import BASELINE, BackendError, Comparison, Workload
from searches.report import markdown as report
from searches.study.bench import ModelBench
from searches.study.finals import RunControl, measure_finals
from searches.study.leaderboard import leaderboard
from searches.study.objective import MeasureSettings
from tests.searches.known import HELD_OUT, PROMPTS, Known, lookup, run_known


@dataclass
class Failing(Known):
    """Some configurations fail, by name, after so many prompts of a comparison."""

    fails: Collection[SpeculativeConfig] = ()
    after: int = 0
    attempts: int = 0
    lacks: str = ""  # what the machine lacks for them

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
        if self.lacks:
            raise UnsupportedModel(self.lacks)
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
    assert leaderboard(study).ranking[0].config == good
    assert bad not in [entry.config for entry in leaderboard(study).ranking]
    text = report.summary(study, None)
    assert "5 trials: 0 stopped early, 3 not run (3 the engine failed)." in text
    assert "- 0: the engine failed: out of memory at layer 3\n" in text
    study = run_known(Failing({good: 1.5}, fails=[bad], lacks="quantized: it needs a C++ compiler"), bad, good)
    assert study.trials[0].user_attrs["reason"] == "the engine failed: quantized: it needs a C++ compiler"
    assert leaderboard(study).ranking[0].config == good


def test_an_engine_that_runs_nothing_ends_the_study() -> None:
    configs = [lookup(length) for length in (4, 6, 8)]
    bench = Failing({}, fails=[SpeculativeConfig()])
    with pytest.raises(BackendError, match=r"^backend: out of memory at layer 3$"):
        run_known(bench, *configs)
    assert bench.attempts == 3


def test_rows_before_a_failure_do_not_rank_a_configuration() -> None:
    good, bad = lookup(4), lookup(8)
    bench = Failing({bad: 9.0}, fails=[bad], after=2)
    study = run_known(bench, good, bad)
    assert study.trials[1].user_attrs["measurement"]["prompts"] == 2
    assert [entry.config for entry in leaderboard(study).ranking] == [good]
    bench.fails = [SpeculativeConfig()]
    with pytest.raises(BackendError):  # finals without plain decoding
        measure_finals(study, bench, HELD_OUT, MeasureSettings(), 0)


SETTINGS = MeasureSettings(finalists=2, held_out_repeats=2)


@pytest.mark.parametrize("after", [0, 7])
def test_a_finalist_that_fails_is_dropped(after: int, tmp_path: Path) -> None:
    best, other = lookup(8), lookup(4)
    bench = Failing({best: 1.8, other: 1.5}, after=after)
    study = run_known(bench, best, other)
    bench.fails = [best]
    bench.asked.clear()
    finals = measure_finals(study, bench, HELD_OUT, SETTINGS, 0, RunControl(tmp_path))
    assert finals.winner.config == other
    (failed,) = [finalist for finalist in finals.finalists if finalist.config == best]
    assert not failed.stayed and not failed.eligible
    assert failed.held_out["prompts"] == after
    assert bench.attempts == 1
    assert [item for config, item in bench.asked if config == other][:24] == [item.id for item in HELD_OUT]
    assert best.label() in report.summary(study, finals)
    bench.asked.clear()
    assert measure_finals(study, bench, HELD_OUT, SETTINGS, 0, RunControl(tmp_path)) == finals
    assert not bench.asked


def test_throughput_compares_whole_requests() -> None:
    config, bench = lookup(4), Known({lookup(4): 2.0})

    def compare(asked: Comparison) -> Any:
        return bench.compare(asked.configs, asked.prompts, asked.repeats, asked.task.seed)

    engine: Any = SimpleNamespace(exact=False, describe=dict, compare=compare)
    benches = {goal: ModelBench(engine, Sampling(), 11, Workload(8, goal)) for goal in ("decoding", "throughput")}
    measured = {
        goal: Measurement.of(bench.compare({"candidate": config}, PROMPTS, 1, 0), BASELINE, "candidate")
        for goal, bench in benches.items()
    }
    assert measured["decoding"].speedup == pytest.approx(2.0)
    # A request of 11 tokens takes 1.1 seconds plainly, of which 0.1 are the prefill, and 0.6 with drafts.
    assert measured["throughput"].speedup == pytest.approx(1.1 / 0.6)
    assert measured["throughput"].baseline_tokens_per_second == pytest.approx(10.0)
    assert benches["decoding"].conditions != benches["throughput"].conditions


class _Loaded(Failing):
    """An engine whose samples hold their requests, eight at a time."""

    def compare(self, *arguments: Any) -> Iterator[dict[str, Sample]]:
        for row in super().compare(*arguments):
            yield {name: replace(sample, requests=(self._request(sample),)) for name, sample in row.items()}

    @staticmethod
    def _request(sample: Sample) -> Request:
        return Request(8, sample.tokens, sample.decoded_tokens, sample.prefill_seconds, sample.decode_seconds)


def test_finals_state_throughput_and_latencies_of_each_finalist() -> None:
    fast, broken = lookup(8), lookup(4)
    bench = _Loaded({fast: 2.0, broken: 1.8}, after=7)
    study = run_known(bench, fast, broken)
    bench.fails = [broken]
    finals = measure_finals(study, bench, HELD_OUT, SETTINGS, 0)
    # Each request has 0.1 seconds of prefill and 10 tokens after the first one: plainly 0.1 seconds each, else 0.05.
    plain = {"throughput": 8 * 11 / 1.1, "ttft_p50": 0.1, "ttft_p95": 0.1, "tpot_p50": 0.1, "tpot_p95": 0.1}
    drafted = {"throughput": 8 * 11 / 0.6, "ttft_p50": 0.1, "ttft_p95": 0.1, "tpot_p50": 0.05, "tpot_p95": 0.05}
    beside = {f"baseline_{name}": value for name, value in plain.items()}
    found = {finalist.config: finalist.held_out.get("metrics", {}) for finalist in finals.finalists}
    assert found[fast] == pytest.approx(drafted | beside)
    assert found[broken].keys() == drafted.keys() | beside.keys()
    assert finals.baseline["metrics"] == pytest.approx(plain | beside)
    assert finals.winner.held_out["metrics"] == found[fast]
    table = report.summary(study, finals).partition("Throughput and latency (held-out prompts)")[2]
    assert f"| {fast.label()} | 146.7 | 50.0 |" in table and "| no drafting | 80.0 | 100.0 |" in table

"""Trials race on a bench with known speedups; rows of a machine that drifts are measured again, without bias."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from layerskip import Measurement, PromptSet, SpeculativeConfig
from layerskip.decoding.stats import DecodeStats, Round
from layerskip.measure.losslessness import Losslessness
from layerskip.measure.measurement import Sample
from searches.study.bench import drifted_rows
from searches.study.leaderboard import configuration
from searches.study.objective import MeasureSettings
from searches.study.pruning import SpeedupBound
from searches.study.study import StudySettings, finished, run_trials
from searches.tracking.names import DRIFTED
from tests.searches.known import PROMPTS, SETTINGS, Known, lookup, new_study, objective_of, run_known

MANY = PromptSet.of([f"prompt {i}" for i in range(24)])
ALL_OF_MANY = MeasureSettings(prompts=24, survivor_prompts=24)
PESSIMIST = SimpleNamespace(estimate=lambda study, _: SpeedupBound(0.5, 0.6, 1.5 if finished(study) else 0.5))
quiet = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning", "ignore:WilcoxonPruner finds steps")


def test_only_trials_level_with_the_leader_get_more_prompts() -> None:
    fast, slow, close = lookup(4), lookup(5), lookup(6)
    bench = Known({fast: 1.5, slow: 1.2, close: 1.49})
    run_known(bench, fast, slow, close)
    assert [bench.count(config) for config in (fast, slow, close)] == [5, 3, 5]


def test_repeats_decode_every_prompt_again_with_other_seeds() -> None:
    bench = Known({lookup(4): 1.5})
    (trial,) = run_known(bench, lookup(4), settings=MeasureSettings(prompts=3, survivor_prompts=3, repeats=2)).trials
    assert bench.count(lookup(4)) == 6
    assert trial.user_attrs["measurement"]["prompts"] == 3 and len(trial.intermediate_values) == 6


def test_prompts_with_drift_are_measured_again() -> None:
    """The repeated prompt is preceded by as many prompts as any other, for drafters that learn."""
    config = lookup(4)
    bench = Known({config: 1.5}, drift=lambda call: 2.0 if call == 17 else 1.0)  # in the fourth trial of five prompts
    done = finished(run_known(bench, *[config] * 4))
    assert [trial.user_attrs.get(DRIFTED, 0) for trial in done] == [0, 0, 0, 1]
    assert done[-1].value == pytest.approx(1.5)
    assert len(set(done[-1].user_attrs["table"]["baseline_tokens_per_second"])) == 1
    names = [item.id for item in PROMPTS.take(None)]
    assert [before for _, _, before in bench.comparisons] == [names[5:]] * 4 + [[*names[5:], *names[:2]]]


def test_no_two_comparisons_share_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicates of the leader are pooled and must be independent."""
    monkeypatch.setattr("searches.study.study._REMEASURE", 2)
    bench = Known({lookup(4): 1.5}, drift=lambda call: 2.0 if call % 7 == 0 else 1.0)
    run_known(bench, lookup(4), trials=9)
    draws = [(seed + place, name) for names, seed, _ in bench.comparisons for place, name in enumerate(names)]
    again = [names for names, *_ in bench.comparisons if len(names) == 1]  # a prompt with drift keeps its seed
    assert len(draws) > 30
    assert len(draws) - len(set(draws)) <= len(again)


def test_trials_begin_with_the_given_prompt() -> None:
    bench = Known({lookup(4): 1.5})
    run_known(bench, lookup(4), seed=1, first_prompt=3)
    turns = [item.id for item in PROMPTS.take(None)]
    assert [prompt for _, prompt in bench.asked] == turns[3:]  # three, and two more as a survivor


@pytest.mark.parametrize(("interrupted", "bounds"), [(0, None), (20, None), (0, PESSIMIST)])
def test_the_leader_is_measured_again_between_starting_points(
    interrupted: int, bounds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted trials do not count, nor does what was predicted: the fastest of many is likely to exceed it."""
    monkeypatch.setattr("searches.study.study._REMEASURE", 3)
    fast, others = lookup(4), [lookup(length) for length in range(5, 17)]
    study, objective = new_study(), objective_of(Known({fast: 1.5}), bounds=bounds)
    for _ in range(interrupted):  # as after Ctrl-C
        study.tell(study.ask(), state=TrialState.FAIL)
    for trials in (6, 12):  # the second time resumed
        run_trials(study, objective, StudySettings(n_trials=trials), starts=[fast, *others])
    tried = [configuration(trial) for trial in finished(study)]
    assert [number for number, config in enumerate(tried) if config == fast] == [0, 4, 8]
    assert [config for config in tried if config != fast] == others[:9]
    measured = [number for number, trial in enumerate(finished(study)) if "table" in trial.user_attrs]
    assert measured == ([*range(12)] if bounds is None else [0, 4, 8])


def test_a_configuration_that_does_not_lead_is_not_measured_a_third_time() -> None:
    fast, slow = lookup(4), lookup(5)
    bench = Known({fast: 1.5, slow: 1.2})
    last = finished(run_known(bench, fast, slow, slow, slow))[-1]
    assert last.state == TrialState.COMPLETE  # with its pooled speedup, for the sampler
    assert last.value == pytest.approx(1.2)
    assert last.user_attrs["reason"] == "measured often enough"
    assert bench.count(slow) == 6


def _raced(bench: Known, *configs: SpeculativeConfig, **more: Any) -> list[TrialState]:
    """Return how trials of a pruner that compares ranks ended."""
    pruner = optuna.pruners.WilcoxonPruner(p_threshold=0.1)
    return [trial.state for trial in run_known(bench, *configs, pruner=pruner, prompts=MANY, **more).trials]


@quiet
def test_a_trial_is_not_stopped_for_ranks_if_one_prompt_makes_the_difference() -> None:
    """Ranks alone would stop the second trial, which is slower on the first five prompts, but only slightly on four."""
    lucky, steady, slow = lookup(4), lookup(5), lookup(6)
    names = [item.id for item in MANY.take(None)]
    luck = dict(zip(names, [1.31, 6.0, 1.32, 1.33, 1.34] + [1.1] * 19, strict=True))

    def speedups(name: str) -> Mapping[SpeculativeConfig, float]:
        return {lucky: luck[name], steady: 1.3, slow: 1.0}

    states = _raced(Known(speedups), lucky, steady, slow, settings=ALL_OF_MANY)
    assert states == [TrialState.COMPLETE, TrialState.COMPLETE, TrialState.PRUNED]


@quiet
def test_a_trial_slower_than_plain_decoding_is_stopped_even_if_it_leads() -> None:
    slow, better = lookup(4), lookup(5)
    states = _raced(Known({slow: 0.7, better: 0.72}), SpeculativeConfig(), slow, better, settings=ALL_OF_MANY)
    assert states == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.PRUNED]


@quiet
def test_the_first_trial_with_a_drafter_decodes_the_prompts_of_every_trial() -> None:
    """Whatever the first of them say; else the finals could not take it."""
    fast, other, again = lookup(4), SpeculativeConfig("quantized"), SpeculativeConfig("quantized", num_speculative_tokens=6)
    bench = Known({fast: 1.5, other: 1.2, again: 1.2})
    states = _raced(bench, fast, other, again, settings=MeasureSettings(prompts=12, survivor_prompts=24))
    assert states == [TrialState.COMPLETE, TrialState.COMPLETE, TrialState.PRUNED]
    assert bench.count(other) == 12 > bench.count(again)


def test_plain_decoding_is_one_trial() -> None:
    """Every other trial measures it, too."""
    bench = Known({})
    study = run_known(bench, SpeculativeConfig(), SpeculativeConfig(), SpeculativeConfig())
    assert ["table" in trial.user_attrs for trial in finished(study)] == [True, False, False]
    assert len(bench.asked) == SETTINGS.prompts  # although it is level with the leader


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

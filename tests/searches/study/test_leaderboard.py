"""The leaderboard pools replicates, weighs prompts alike, and adds contenders with other drafters."""

from __future__ import annotations

from collections.abc import Mapping

import optuna
import pytest

from layerskip import SpeculativeConfig
from searches.study.leaderboard import LeaderboardEntry, contenders, ranking
from tests.searches.known import Known, lookup, measured_trial, run_known


def _entry(*tables: Mapping[str, float]) -> LeaderboardEntry:
    entry = LeaderboardEntry(lookup(4))
    for speedups in tables:
        entry.add(measured_trial(lookup(4), speedups).user_attrs["table"])
    return entry


def test_a_prompt_weighs_no_more_if_it_was_decoded_more_often() -> None:
    once = {"a": 4.0, "b": 1.0, "c": 1.0}
    assert _entry(once, *[{"a": 4.0}] * 5).speedup == pytest.approx(_entry(once).speedup) == pytest.approx(3 / 2.25)


def test_configurations_are_compared_on_common_prompts() -> None:
    """The first is fast on an easy prompt that the second did not decode, which is faster on all common prompts."""
    study = optuna.create_study(direction="maximize")
    study.add_trial(measured_trial(lookup(4), {"a": 1.2, "b": 1.2, "c": 1.8}))
    study.add_trial(measured_trial(lookup(5), {"a": 1.3, "b": 1.3}))
    first, second = ranking(study)
    assert (first.config, second.config) == (lookup(5), lookup(4))
    assert first.speedup < second.speedup


def test_a_lucky_leader_is_measured_again_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("searches.study.study._REMEASURE", 3)
    lucky, solid = lookup(4), lookup(5)

    def speedups(name: str) -> Mapping[SpeculativeConfig, float]:
        return {solid: 1.4, lucky: 1.6 if bench.calls < 5 else 1.0}

    bench = Known(speedups)
    study = run_known(bench, lucky, solid, *(lookup(length) for length in range(6, 12)), trials=14)
    assert ranking(study)[0].config == solid
    assert next(entry.complete for entry in ranking(study) if entry.config == lucky) >= 2


def test_the_best_of_another_drafter_and_the_first_of_the_leaders_contend_if_about_as_fast() -> None:
    recycling = SpeculativeConfig("token_recycling", 4)
    lookups = [lookup(length) for length in range(4, 9)]
    for speedup, second in ((1.45, recycling), (1.2, lookups[-2])):
        bench = Known({lookup: 1.5 + place / 100 for place, lookup in enumerate(lookups)} | {recycling: speedup})
        study = run_known(bench, *lookups, recycling)
        configs = [entry.config for entry in contenders(study, 2)]
        assert configs == [lookups[-1], second, lookups[0]]

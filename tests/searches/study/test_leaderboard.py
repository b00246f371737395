"""The leaderboard pools replicates and weighs prompts alike; the first comparison of a study decodes starting points."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest

from layerskip import PromptSet, SpeculativeConfig
from layerskip.measure.measurement import Sample
from searches.space.search_space import SearchSpace
from searches.study.budget import Budget
from searches.study.leaderboard import LeaderboardEntry, contenders, leaderboard
from searches.study.objective import MeasureSettings, Objective
from searches.study.starting_points import cheap_arms, compare_arms
from searches.study.study import StudySettings, run_trials
from searches.workers.pool import ALONE
from tests.searches.known import PROMPTS, SETTINGS, Known, lookup, measured_trial, new_study, run_known


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
    first, second = leaderboard(study).ranking
    assert (first.config, second.config) == (lookup(5), lookup(4))
    assert first.speedup < second.speedup


def test_a_lucky_leader_is_measured_again_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("searches.study.study._REMEASURE", 3)
    lucky, solid = lookup(4), lookup(5)

    def speedups(name: str) -> Mapping[SpeculativeConfig, float]:
        return {solid: 1.4, lucky: 1.6 if bench.calls < 5 else 1.0}

    bench = Known(speedups)
    study = run_known(bench, lucky, solid, *(lookup(length) for length in range(6, 12)), trials=14)
    assert leaderboard(study).ranking[0].config == solid
    assert next(entry.complete for entry in leaderboard(study).ranking if entry.config == lucky) >= 2


def test_the_best_of_another_drafter_and_the_first_of_the_leaders_contend_if_about_as_fast() -> None:
    recycling = SpeculativeConfig("token_recycling", 4)
    lookups = [lookup(length) for length in range(4, 9)]
    for speedup, second in ((1.45, recycling), (1.2, lookups[-2])):
        bench = Known({lookup: 1.5 + place / 100 for place, lookup in enumerate(lookups)} | {recycling: speedup})
        study = run_known(bench, *lookups, recycling)
        configs = [entry.config for entry in contenders(study, 2)]
        assert configs == [lookups[-1], second, lookups[0]]


SPACE = SearchSpace(6, methods=["none", "prompt_lookup", "token_recycling", "cascade", "layer_skip"])
ARMS = cheap_arms(SPACE)


def _compare(
    bench: Known, folder: Path, spent: float = 0.0, prompts: PromptSet = PROMPTS
) -> dict[SpeculativeConfig, list[Any]]:
    budget = Budget(optuna.create_study(), 100.0, time.monotonic() - spent)
    objective = Objective(bench, SPACE, prompts, MeasureSettings(prompts=None, survivor_prompts=None), seed=0)
    return compare_arms(ARMS, objective, folder, budget, ALONE)


def test_the_arms_are_those_that_need_no_preparation() -> None:
    lookup, recycling, cascade = ARMS
    assert (lookup.method, recycling.method) == ("prompt_lookup", "token_recycling")
    assert [member.method for member in cascade.members] == ["prompt_lookup", "token_recycling"]
    assert cascade.members[1] == recycling
    assert cheap_arms(SearchSpace(6, methods=["none", "layer_skip"])) == []


def test_arms_share_plain_decoding_and_become_trials_that_decode_nothing(tmp_path: Path) -> None:
    bench, study = Known(dict(zip(ARMS, (1.2, 1.4, 1.7), strict=True))), new_study()
    objective = Objective(bench, SPACE, PROMPTS, SETTINGS, seed=0)
    objective.compared = _compare(bench, tmp_path, prompts=objective.first)
    run_trials(study, objective, StudySettings(n_trials=3), starts=ARMS)
    assert bench.calls == len(objective.first)  # one row a prompt
    assert [(entry.config, round(entry.speedup, 6)) for entry in leaderboard(study).ranking] == list(
        zip(ARMS, (1.2, 1.4, 1.7), strict=True)
    )[::-1]
    assert leaderboard(study).ranking[0].seconds.keys() == {item.id for item in objective.first}


def test_rows_of_a_killed_comparison_are_not_measured_again(tmp_path: Path) -> None:
    class Killed(Known):
        def compare(self, *arguments: Any, **more: Any) -> Iterator[dict[str, Sample]]:
            for number, row in enumerate(super().compare(*arguments, **more)):
                if number == 5:
                    raise KeyboardInterrupt
                yield row

    with pytest.raises(KeyboardInterrupt):
        _compare(Killed({}), tmp_path)
    bench = Known({})
    rows = _compare(bench, tmp_path)
    assert {prompt for _, prompt in bench.asked} == {item.id for item in PROMPTS.take(None).items[5:]}
    assert all(len(found) == len(PROMPTS) for found in rows.values())


def test_the_comparison_ends_at_its_share_but_not_before_three_prompts(tmp_path: Path) -> None:
    for _ in range(2):  # the second time from the log
        assert {len(found) for found in _compare(Known({}), tmp_path, spent=60.0).values()} == {3}

"""The first comparison of a study on a bench with known speedups."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from layerskip import PromptSet, SpeculativeConfig
from layerskip.measure.measurement import Sample
from searches.space.search_space import SearchSpace
from searches.study.budget import Budget
from searches.study.leaderboard import ranking
from searches.study.objective import MeasureSettings, Objective
from searches.study.starting_points import cheap_arms, compare_arms
from searches.study.study import StudySettings, run_trials
from searches.workers.pool import ALONE
from tests.searches.known import PROMPTS, SETTINGS, Known, new_study

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
    assert [(entry.config, round(entry.speedup, 6)) for entry in ranking(study)] == list(
        zip(ARMS, (1.2, 1.4, 1.7), strict=True)
    )[::-1]
    assert ranking(study)[0].seconds.keys() == {item.id for item in objective.first}


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

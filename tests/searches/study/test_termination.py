"""Trials end once another one costs more than it saves, and not before the planted best of a simulated study is found."""

from __future__ import annotations

import itertools
import math
import statistics
from types import SimpleNamespace

import optuna
import pytest

from layerskip import Sampling
from searches.evaluate.simulated import TOKENS, Landscape, Machine, SimulatedBackend, draw_prompts
from searches.space.search_space import SearchSpace
from searches.study.bench import ModelBench
from searches.study.leaderboard import leaderboard
from searches.study.objective import MeasureSettings, Objective
from searches.study.study import StudySettings, run_trials
from searches.study.termination import expected_gain
from tests.searches.known import Known, lookup, run_known

SPACE = SearchSpace(layers=8, methods=["none", "prompt_lookup"])
STARTS = [lookup(2), lookup(3)]
LANDSCAPE = Landscape.draw(1, SPACE.layers)


@pytest.mark.parametrize("lengths", [[4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4], [4, 9, 8, 4, 9, 5, 7], [2, 3, 2]])
def test_the_gain_is_that_of_the_later_half_over_an_average_half_or_over_the_earlier_one(lengths: list[int]) -> None:
    """A repeated trial gains nothing, and neither does one that is slower than plain decoding."""
    speedups = {lookup(length): length / 3 for length in lengths}
    study = run_known(Known(speedups), *map(lookup, lengths))
    gains = [max(0.0, math.log(speedups[config])) for config in dict.fromkeys(map(lookup, lengths))]
    gains += [0.0] * (len(lengths) - len(gains))
    half = len(lengths) // 2
    average = statistics.fmean(max(part) for part in itertools.combinations(gains, half))
    earlier = max(0.0, *(math.log(length / 3) for length in lengths[:half]))
    assert len(leaderboard(study).trials) == len(lengths)
    expected = (max(gains) - min(average, earlier)) / (len(lengths) - half)
    assert expected_gain(leaderboard(study)) == pytest.approx(expected)


def _search(tokens: int, monkeypatch: pytest.MonkeyPatch) -> tuple[optuna.Study, str]:
    """Search the landscape on a clock that only decoding advances; return also until when the trials ran, twice the same."""
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr("searches.evaluate.simulated.time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr("searches.study.objective.time", SimpleNamespace(monotonic=lambda: clock[0]))
    backend = SimulatedBackend(landscape=LANDSCAPE, machine=Machine(1), pace=1.0)
    measuring = MeasureSettings(prompts=12, survivor_prompts=12)
    objective = Objective(ModelBench(backend, Sampling(), max(TOKENS)), SPACE, draw_prompts(20, 1), measuring, 1)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=1))
    settings = StudySettings(n_trials=40, expected_tokens=tokens)
    until = run_trials(study, objective, settings, starts=STARTS)
    count = len(study.trials)
    assert run_trials(study, objective, settings, starts=STARTS) == until  # as a resumed study
    assert len(study.trials) == count
    return study, until


def test_trials_go_on_until_the_planted_best_is_found_if_many_tokens_will_be_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With fewer tokens, the sampler finds nothing that pays before they end."""
    best = max(LANDSCAPE.speedup(config) for config in SPACE.lookups())
    reached = {}
    for tokens in (10**5, 10**6, 10**8):
        study, until = _search(tokens, monkeypatch)
        leader = leaderboard(study).leader
        assert leader is not None
        reached[len(study.trials)] = LANDSCAPE.speedup(leader.config) / best
        assert until.endswith(f"of {tokens} tokens") == (tokens < 10**8)
    few, more, every = sorted(reached)
    assert (few, every) == (len(STARTS) + 8, 40) and few < more < every
    assert reached[few] < 0.98 and reached[more] > 0.99 and reached[every] > 0.99

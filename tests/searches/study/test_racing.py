"""Trials race on a bench with known speedups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from layerskip import PromptSet, SpeculativeConfig
from layerskip.measure.measurement import Sample
from searches.study.leaderboard import LeaderboardEntry, configuration, ranking
from searches.study.objective import MeasureSettings
from searches.study.pruning import SpeedupBound
from searches.study.study import StudySettings, finished, run_trials
from searches.tracking.names import DRIFTED
from tests.searches.known import PROMPTS, SETTINGS, Known, lookup, new_study, objective_of, run_known


def test_only_trials_level_with_the_leader_get_more_prompts() -> None:
    fast, slow, close = lookup(4), lookup(5), lookup(6)
    bench = Known({fast: 1.5, slow: 1.2, close: 1.49})
    run_known(bench, fast, slow, close)
    counts = {config: len([c for c, _ in bench.asked if c == config]) for config in (fast, slow, close)}
    assert counts == {fast: 5, slow: 3, close: 5}


def test_a_trial_that_is_still_level_is_repeated() -> None:
    fast, once = lookup(4), lookup(5)

    class Uneven(Known):
        """One of the two is level on the first prompts only."""

        def compare(
            self, configs: Mapping[str, SpeculativeConfig], prompts: PromptSet, repeats: int, seed: int, *_: object
        ) -> Iterator[dict[str, Sample]]:
            for number, item in enumerate(prompts):
                self.speedups = {fast: 1.5, once: 1.5 if number < 3 else 1.2}
                yield from super().compare(configs, PromptSet((item,)), repeats, seed)

    bench = Uneven({})
    run_known(bench, fast, once, settings=MeasureSettings(prompts=3, survivor_prompts=5))
    assert [sum(config == asked for asked, _ in bench.asked) for config in (fast, once)] == [10, 5]


def test_a_level_trial_is_repeated_if_there_are_no_more_prompts() -> None:
    fast, slow = lookup(4), lookup(5)
    bench = Known({fast: 1.5, slow: 1.2})
    run_known(bench, fast, slow, settings=MeasureSettings(prompts=None, survivor_prompts=None))
    assert [sum(config == asked for asked, _ in bench.asked) for config in (fast, slow)] == [16, 8]


def test_a_prompt_with_drift_is_measured_again() -> None:
    config = lookup(4)
    # The machine is slow once in the fourth trial of five prompts.
    bench = Known({config: 1.5}, drift=lambda call: 2.0 if call == 16 else 1.0)
    study = run_known(bench, config, config, config, config)
    trials = finished(study)
    assert [trial.user_attrs.get(DRIFTED, 0) for trial in trials] == [0, 0, 0, 1]
    assert bench.calls == 21
    assert trials[-1].user_attrs["table"]["baseline_tokens_per_second"] == [10.0] * 5
    assert trials[-1].value == pytest.approx(1.5)


def test_a_trial_that_was_slow_throughout_is_measured_again() -> None:
    """Its prompts are alike, but differ from earlier trials."""
    config = lookup(4)
    bench = Known({config: 1.5}, drift=lambda call: 2.0 if 10 <= call < 13 else 1.0)
    trials = finished(run_known(bench, config, config, config))
    assert [trial.user_attrs.get(DRIFTED, 0) for trial in trials] == [0, 0, 3]
    assert trials[-1].user_attrs["table"]["baseline_tokens_per_second"] == [10.0] * 5


def test_a_machine_that_stays_slower_becomes_the_usual_one() -> None:
    config = lookup(4)
    bench = Known({config: 1.5}, drift=lambda call: 2.0 if call >= 15 else 1.0)
    trials = finished(run_known(bench, *[config] * 8))
    assert [trial.user_attrs.get(DRIFTED, 0) for trial in trials] == [0, 0, 0, 5, 5, 0, 0, 0]


def test_learning_drafters_are_warmed_when_a_prompt_is_measured_again() -> None:
    config = lookup(4)
    warmup: list[list[str]] = []

    class Watched(Known):
        def compare(
            self, configs: Mapping[str, SpeculativeConfig], prompts: PromptSet, repeats: int, seed: int, *rest: Any
        ) -> Iterator[dict[str, Sample]]:
            if rest:
                warmup.append([item.id for item in rest[1]])
            return super().compare(configs, prompts, repeats, seed)

    bench = Watched({config: 1.5}, drift=lambda call: 2.0 if call == 17 else 1.0)
    run_known(bench, config, config, config, config)
    names = [item.id for item in PROMPTS.take(None)]
    others, measured = names[5:], names[:5]
    # Each trial begins with unmeasured prompts; the repeated prompt was also preceded by measured ones.
    assert warmup == [others] * 4 + [[*others, *measured[:2]]]


def test_interrupted_trials_do_not_count_towards_remeasuring_the_leader() -> None:
    fast, others = lookup(4), [lookup(length) for length in range(5, 12)]
    bench = Known({fast: 1.5})
    study = new_study()
    for _ in range(20):  # as after Ctrl-C
        study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)
    objective = objective_of(bench)
    run_trials(study, objective, StudySettings(n_trials=6, remeasure=3), lambda trial: None, [fast, *others])
    tried = [SpeculativeConfig.from_dict(trial.user_attrs["config"]) for trial in finished(study)]
    assert [place for place, config in enumerate(tried) if config == fast] == [0, 4]


def test_no_two_comparisons_share_a_seed() -> None:
    """Replicates of the leader are pooled and must be independent."""

    class Drawing(Known):
        def compare(
            self, configs: Any, prompts: PromptSet, repeats: int, seed: int, *rest: Any
        ) -> Iterator[dict[str, Sample]]:
            draws.extend((seed + place, item.id) for place, item in enumerate(prompts))
            return super().compare(configs, prompts, repeats, seed, *rest)

    draws: list[tuple[int, str]] = []
    fast, settings = lookup(4), MeasureSettings(prompts=3, survivor_prompts=5, survivor_repeats=1)
    study = new_study()
    objective = objective_of(Drawing({fast: 1.5}), settings=settings)
    run_trials(study, objective, StudySettings(n_trials=9, remeasure=2), lambda trial: None, [fast])
    assert len(draws) > 30
    assert len(set(draws)) == len(draws)


def test_trials_begin_with_the_given_prompt() -> None:
    bench, fast = Known({lookup(4): 1.5}), lookup(4)
    study = new_study()
    objective = objective_of(bench, seed=1, first_prompt=3)
    run_trials(study, objective, StudySettings(n_trials=1), lambda trial: None, [fast])
    turns = [item.id for item in PROMPTS.take(None)]
    assert [prompt for _, prompt in bench.asked] == turns[3:]  # three, and two more as a survivor


def test_the_leader_is_measured_again_between_starting_points() -> None:
    fast, others = lookup(4), [lookup(length) for length in range(5, 17)]
    bench = Known({fast: 1.5})
    study = new_study()
    objective = objective_of(bench)
    run_trials(study, objective, StudySettings(n_trials=6, remeasure=3), lambda trial: None, [fast, *others])
    run_trials(study, objective, StudySettings(n_trials=12, remeasure=3), lambda trial: None, [fast, *others])  # resumed
    tried = [configuration(trial) for trial in finished(study)]
    assert [number for number, config in enumerate(tried) if config == fast] == [0, 4, 8]
    assert [config for config in tried if config != fast] == others[:9]


def test_a_configuration_that_does_not_lead_is_not_measured_a_third_time() -> None:
    fast, slow = lookup(4), lookup(5)
    bench = Known({fast: 1.5, slow: 1.2})
    study = run_known(bench, fast, slow, slow, slow)
    last = finished(study)[-1]
    assert last.state == TrialState.COMPLETE  # with its pooled speedup, for the sampler
    assert last.value == pytest.approx(1.2)
    assert last.user_attrs["reason"] == "measured often enough"
    assert len([config for config, _ in bench.asked if config == slow]) == 6


def test_a_pruned_configuration_is_bounded_again() -> None:
    """A sampler repeats configurations; a repeated suggestion is still not decoded."""

    class Pessimist:
        def estimate(self, study: optuna.Study, config: SpeculativeConfig) -> SpeedupBound:
            return SpeedupBound(0.5, 0.6, 1.0)

    bench = Known({})
    study = run_known(bench, *[lookup(4)] * 3, bounds=Pessimist())
    assert [trial.state for trial in finished(study)] == [TrialState.PRUNED] * 3
    assert not bench.asked


def test_a_leader_is_measured_again_whatever_was_predicted() -> None:
    """The fastest of many trials is likely to exceed its prediction and must not block the study."""

    class Pessimist:
        def estimate(self, study: optuna.Study, config: SpeculativeConfig) -> SpeedupBound:
            return SpeedupBound(0.5, 0.6, 1.0 if not finished(study) else 1.5)

    fast, others = lookup(4), [lookup(length) for length in range(5, 17)]
    bench = Known({fast: 1.5})
    study = new_study()
    objective = objective_of(bench)
    run_trials(study, objective, StudySettings(n_trials=1), lambda trial: None, [fast])
    objective.bounds = Pessimist()  # type: ignore[assignment]
    run_trials(study, objective, StudySettings(n_trials=12, remeasure=3), lambda trial: None, others)
    trials = finished(study)
    assert [trial.number for trial in trials if configuration(trial) == fast] == [0, 4, 8]
    assert [trial.number for trial in trials if "table" in trial.user_attrs] == [0, 4, 8]


def test_configurations_are_compared_on_common_prompts() -> None:
    """A is fast on an easy prompt that B did not decode; B is faster on all common prompts."""
    a, b = LeaderboardEntry(lookup(4)), LeaderboardEntry(lookup(5))
    table = {"prompt_id": ["1", "2", "easy"], "decode_seconds": [1.0] * 3, "baseline_tokens_per_second": [10.0] * 3}
    a.add(table | {"tokens_per_second": [12.0, 12.0, 18.0]})
    b.add({name: values[:2] for name, values in (table | {"tokens_per_second": [13.0] * 3}).items()})
    assert a.speedup > b.speedup
    study = optuna.create_study(direction="maximize")
    for entry in (a, b):
        attributes = {
            "config": entry.config.to_dict(),
            "measurement": {"losslessness": {"verdict": "exact"}},
            "table": table | {"tokens_per_second": [12.0, 12.0, 18.0]}
            if entry is a
            else {name: values[:2] for name, values in (table | {"tokens_per_second": [13.0] * 3}).items()},
        }
        study.add_trial(optuna.trial.create_trial(value=1.0, user_attrs=attributes))
    assert [entry.config for entry in ranking(study)] == [b.config, a.config]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning", "ignore:WilcoxonPruner finds steps")
def test_a_trial_is_not_stopped_for_ranks_if_one_prompt_makes_the_difference() -> None:
    """Ranks alone would stop the second trial, which is slower on the first five prompts, but only slightly on four."""
    lucky, steady, slow = lookup(4), lookup(5), lookup(6)
    prompts = PromptSet.of([f"prompt {i}" for i in range(24)])
    speedups = dict(zip(prompts.take(None), [1.31, 6.0, 1.32, 1.33, 1.34] + [1.1] * 19, strict=True))

    class Uneven(Known):
        def compare(
            self, configs: Mapping[str, SpeculativeConfig], prompts: PromptSet, repeats: int, seed: int, *_: object
        ) -> Iterator[dict[str, Sample]]:
            for item in prompts:
                self.speedups = {lucky: speedups[item], steady: 1.3, slow: 1.0}
                yield from super().compare(configs, PromptSet((item,)), repeats, seed)

    pruner, settings = optuna.pruners.WilcoxonPruner(p_threshold=0.1), MeasureSettings(prompts=24, survivor_prompts=24)
    study = run_known(Uneven({}), lucky, steady, slow, pruner=pruner, prompts=prompts, settings=settings)
    assert [trial.state for trial in finished(study)] == [TrialState.COMPLETE, TrialState.COMPLETE, TrialState.PRUNED]
    assert ranking(study)[0].config == steady


def test_plain_decoding_is_one_trial() -> None:
    """Every other trial measures it, too."""
    bench = Known({})
    study = run_known(bench, SpeculativeConfig(), SpeculativeConfig(), SpeculativeConfig())
    assert ["table" in trial.user_attrs for trial in finished(study)] == [True, False, False]
    assert len(bench.asked) == SETTINGS.prompts  # although it is level with the leader


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning", "ignore:WilcoxonPruner finds steps")
def test_a_trial_slower_than_plain_decoding_is_stopped_even_if_it_leads() -> None:
    slow, better = lookup(4), lookup(5)
    bench = Known({slow: 0.7, better: 0.72})
    prompts = PromptSet.of([f"prompt {i}" for i in range(24)])
    pruner, settings = optuna.pruners.WilcoxonPruner(p_threshold=0.1), MeasureSettings(prompts=24, survivor_prompts=24)
    study = run_known(bench, SpeculativeConfig(), slow, better, pruner=pruner, prompts=prompts, settings=settings)
    assert [trial.state for trial in finished(study)] == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.PRUNED]

"""The Gaussian process models the parameters of the leading method, and pruned trials by their predictions."""

from __future__ import annotations

import optuna
import pytest
from optuna.trial import TrialState

from searches.space.search_space import SearchSpace
from searches.study.gaussian_process import GaussianProcess, trials_of_leading_method
from searches.tracking.names import PREDICTED

SPACE = SearchSpace(
    8, methods=["none", "layer_skip", "prompt_lookup"], ranges={"layer_skip": {"siblings": (0, 0), "stop": ["length"]}}
)
BITS = {f"{sublayer}_{layer}" for sublayer in ("attention", "mlp") for layer in range(2, 6)}


def _speedup(params: dict[str, object]) -> float:
    """Return a speedup: skipping attention pays, skipping an MLP does not, and lookups are slowest."""
    if params["method"] != "layer_skip":
        return 0.5
    return 1 + 0.1 * sum(int(str(params[name])) * (1 if name.startswith("attention") else -1) for name in BITS)


def _searched(count: int) -> optuna.Study:
    study = optuna.create_study(direction="maximize", sampler=GaussianProcess(4, 0))
    study.enqueue_trial({"method": "none"})
    study.enqueue_trial({"method": "layer_skip"})
    for _ in range(count):
        trial = study.ask()
        SPACE.suggest(trial)
        study.tell(trial, _speedup(trial.params))
    return study


def test_parameters_of_the_leading_method_are_sampled_jointly() -> None:
    study = _searched(40)
    assert study.best_value == pytest.approx(1.4)  # the optimum
    trial = study.ask()
    assert {*BITS, "layer_skip.num_speculative_tokens"} == set(trial.relative_params)
    plain = optuna.create_study(direction="maximize", sampler=optuna.samplers.GPSampler(seed=0, n_startup_trials=4))
    plain.add_trials(study.get_trials(states=(TrialState.COMPLETE,)))
    assert set(plain.ask().relative_params) == {"method"}  # as Optuna's own sampler does


def test_workers_at_the_same_time_try_different_parameters() -> None:
    study = _searched(12)
    chosen = []
    for _ in range(4):
        study.enqueue_trial({"method": "layer_skip"})
        trial = study.ask()
        SPACE.suggest(trial)
        chosen.append({name: trial.params[name] for name in (*BITS, "layer_skip.num_speculative_tokens")})
    assert all(chosen.count(params) == 1 for params in chosen)


def test_pruned_trials_count_with_their_predictions() -> None:
    study = _searched(12)
    study.enqueue_trial(study.best_params)
    trial = study.ask()
    assert SPACE.suggest(trial).method == "layer_skip"
    trial.set_user_attr(PREDICTED, 0.7)
    study.tell(trial, state=TrialState.PRUNED)
    known = [found.value for found in trials_of_leading_method(study)]
    assert 0.7 in known
    assert len(known) == sum(found.params["method"] == "layer_skip" for found in study.trials)

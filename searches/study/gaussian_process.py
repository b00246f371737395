"""A Gaussian-process sampler for a search space with one branch per method.

Optuna's ``GPSampler`` models only the parameters that all trials share. In this space that is the method alone. This sampler
models the parameters of the leading method. Pruned trials count with their predicted speedup, since they would be suggested
again and again otherwise. Running trials of other workers count, too: ``GPSampler`` keeps away from them (constant liar).
"""

from __future__ import annotations

from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.search_space import intersection_search_space
from optuna.trial import FrozenTrial, TrialState, create_trial

from searches.tracking.names import PREDICTED

_METHOD = "method"  # the parameter that chooses the branch; some studies do not have it


class GaussianProcess(optuna.samplers.BaseSampler):
    """Optuna's ``GPSampler`` over the trials of the leading method, and TPE for parameters that not all of these have.

    TPE also samples the first ``n_startup_trials`` of a method.
    """

    def __init__(self, n_startup_trials: int, seed: int) -> None:
        self._startup, self._seed = n_startup_trials, seed
        self._tpe = optuna.samplers.TPESampler(seed=seed, n_startup_trials=n_startup_trials)

    def reseed_rng(self) -> None:
        """Reseed the random number generator, as Optuna requires of samplers that are copied."""
        self._tpe.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the parameters that all trials of the leading method share; TPE chooses the method itself."""
        shared = intersection_search_space(trials_of_leading_method(study))
        return {name: distribution for name, distribution in shared.items() if not distribution.single()}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Sample from the Gaussian process; return nothing while there are too few trials."""
        method = _leading_method(study)
        known = _trials_of(study, method)
        if not search_space or len(known) < self._startup:
            return {}
        running = [
            _without_branch(other, None)
            for other in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if other.number != trial.number
            and other.params.get(_METHOD) == method
            and search_space.keys() <= other.params.keys()
        ]
        process = optuna.samplers.GPSampler(seed=self._seed + trial.number, n_startup_trials=0)
        one_method = optuna.create_study(direction=study.direction, sampler=process)
        one_method.add_trials([*known, *(other for other in running if other is not None)])
        chosen: dict[str, Any] = one_method.ask().relative_params
        return {name: chosen[name] for name in search_space if name in chosen}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Sample a parameter with TPE."""
        return self._tpe.sample_independent(study, trial, param_name, param_distribution)


def trials_of_leading_method(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials of the method with the best trial, with their measured or predicted speedups as values."""
    return _trials_of(study, _leading_method(study))


def _trials_of(study: optuna.Study, method: str | None) -> list[FrozenTrial]:
    converted = (_without_branch(trial, value) for value, trial in _valued(study) if trial.params.get(_METHOD) == method)
    return [trial for trial in converted if trial is not None]


def _leading_method(study: optuna.Study) -> str | None:
    """Return the method of the best trial, a measured one if there is any; None without trials, or without methods."""
    best = max(_valued(study), key=lambda pair: (pair[1].state == TrialState.COMPLETE, pair[0]), default=None)
    return None if best is None else best[1].params.get(_METHOD)


def _valued(study: optuna.Study) -> list[tuple[float, FrozenTrial]]:
    """Return the measured or predicted speedups of the finished trials that have one."""
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
    valued = (
        (trial.value if trial.state == TrialState.COMPLETE else trial.user_attrs.get(PREDICTED), trial) for trial in trials
    )
    return [(float(value), trial) for value, trial in valued if value is not None and trial.params]


def _without_branch(trial: FrozenTrial, value: float | None) -> FrozenTrial | None:
    """Return a copy of a trial without its method; None if a scan chose a value that is not among the sampler's choices.

    ``value=None`` makes a copy that runs.
    """
    params, distributions = ({k: v for k, v in part.items() if k != _METHOD} for part in (trial.params, trial.distributions))
    state = TrialState.RUNNING if value is None else TrialState.COMPLETE
    try:
        return create_trial(state=state, params=params, distributions=distributions, value=value)
    except ValueError:
        return None

"""A Gaussian-process sampler for a search space with one branch per kind of drafter.

Optuna's ``GPSampler`` models only the parameters that all trials share. In this space that is the kind alone. This sampler
models the parameters of the leading kind. Pruned trials count with their predicted speedup, since they would be suggested
again and again otherwise. Running trials of other workers count, too: ``GPSampler`` keeps away from them (constant liar).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.search_space import intersection_search_space
from optuna.trial import FrozenTrial, TrialState, create_trial

from searches.tracking.names import PREDICTED

_KIND = "kind"  # the parameter that chooses the branch; some studies do not have it


class GaussianProcess(optuna.samplers.BaseSampler):
    """Optuna's ``GPSampler`` over the trials of the leading kind, and TPE for parameters that not all of these have.

    TPE also samples the first ``n_startup_trials`` of a kind.
    """

    def __init__(self, n_startup_trials: int, seed: int) -> None:
        self._startup, self._seed = n_startup_trials, seed
        self._tpe = optuna.samplers.TPESampler(seed=seed, n_startup_trials=n_startup_trials)

    def reseed_rng(self) -> None:
        """Reseed the random number generator, as Optuna requires of samplers that are copied."""
        self._tpe.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the parameters that all trials of the leading kind share; TPE chooses the kind itself."""
        shared = intersection_search_space(trials_of_leading_kind(study))
        return {name: distribution for name, distribution in shared.items() if not distribution.single()}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Sample from the Gaussian process; return nothing while there are too few trials."""
        known = trials_of_leading_kind(study)
        if not search_space or len(known) < self._startup:
            return {}
        running = _running_trials(study, trial, search_space.keys())
        process = optuna.samplers.GPSampler(seed=self._seed + trial.number, n_startup_trials=0)
        one_kind = optuna.create_study(direction=study.direction, sampler=process)
        one_kind.add_trials([*known, *running])
        chosen: dict[str, Any] = one_kind.ask().relative_params
        return {name: chosen[name] for name in search_space if name in chosen}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Sample with TPE.

        Args:
            study: the study.
            trial: the trial that asks.
            param_name: of the parameter.
            param_distribution: of the parameter.
        """
        return self._tpe.sample_independent(study, trial, param_name, param_distribution)


def trials_of_leading_kind(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials of the kind with the best trial, with their measured or predicted speedups as values."""
    valued = []
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
        value = trial.value if trial.state == TrialState.COMPLETE else trial.user_attrs.get(PREDICTED)
        if value is not None and trial.params:
            valued.append((float(value), trial))
    if not valued:
        return []
    _, best = max(valued, key=lambda pair: (pair[1].state == TrialState.COMPLETE, pair[0]))
    kind = best.params.get(_KIND)
    converted = (_without_branch(trial, value) for value, trial in valued if trial.params.get(_KIND) == kind)
    return [trial for trial in converted if trial is not None]


def _running_trials(study: optuna.Study, asking: FrozenTrial, names: Collection[str]) -> list[FrozenTrial]:
    """Return copies of the running trials that have all of some parameters, except the one that asks."""
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return [
        create_trial(
            state=TrialState.RUNNING,
            params={name: trial.params[name] for name in names},
            distributions={name: trial.distributions[name] for name in names},
        )
        for trial in running
        if trial.number != asking.number and set(names) <= trial.params.keys()
    ]


def _without_branch(trial: FrozenTrial, value: float) -> FrozenTrial | None:
    """Return a copy of a trial without its kind; None if a scan chose a value that is not among the sampler's choices."""
    params, distributions = _without_kind(trial.params), _without_kind(trial.distributions)
    try:
        return create_trial(params=params, distributions=distributions, value=value)
    except ValueError:
        return None


def _without_kind(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name != _KIND}

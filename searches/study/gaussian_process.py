"""How does a Gaussian process search a space that forks? Over the parameters of one kind of drafter, the one that leads.

Optuna's own models what all trials share, which beside plain decoding is the kind alone. What a prior foretold instead of
running it counts as measured, else it would be proposed for ever.
"""

from __future__ import annotations

from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.search_space import intersection_search_space
from optuna.trial import FrozenTrial, TrialState, create_trial

from searches.tracking.names import PREDICTED

_KIND = "kind"  # the parameter that the space forks at; studies without it do not


class GaussianProcess(optuna.samplers.BaseSampler):
    """Optuna's Gaussian process over the trials of the leading kind; TPE for what these do not all have.

    Args:
        n_startup_trials: so many trials of a kind are TPE's.
        seed: of both.
    """

    def __init__(self, n_startup_trials: int, seed: int) -> None:
        self._startup, self._seed = n_startup_trials, seed
        self._rest = optuna.samplers.TPESampler(seed=seed, n_startup_trials=n_startup_trials)

    def reseed_rng(self) -> None:
        """As Optuna asks of samplers that are copied."""
        self._rest.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """What all trials of the leading kind share and may choose; which kind comes next is TPE's choice."""
        shared = intersection_search_space(leading(study))
        return {name: distribution for name, distribution in shared.items() if not distribution.single()}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The process's choice; nothing while there are few trials."""
        known = leading(study)
        if not search_space or len(known) < self._startup:
            return {}
        process = optuna.samplers.GPSampler(seed=self._seed + trial.number, n_startup_trials=0)
        one_kind = optuna.create_study(direction=study.direction, sampler=process)
        one_kind.add_trials(known)
        chosen: dict[str, Any] = one_kind.ask().relative_params
        return {name: chosen[name] for name in search_space if name in chosen}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """TPE's choice."""
        return self._rest.sample_independent(study, trial, param_name, param_distribution)


def leading(study: optuna.Study) -> list[FrozenTrial]:
    """Trials of the kind whose best one is best, with what is known of them."""
    valued = []
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
        value = trial.value if trial.state == TrialState.COMPLETE else trial.user_attrs.get(PREDICTED)
        if value is not None and trial.params:
            valued.append((float(value), trial))
    if not valued:
        return []
    _, best = max(valued, key=lambda pair: (pair[1].state == TrialState.COMPLETE, pair[0]))
    alike = [(value, trial) for value, trial in valued if trial.params.get(_KIND) == best.params.get(_KIND)]
    return [found for value, trial in alike if (found := _of_its_kind(trial, value)) is not None]


def _of_its_kind(trial: FrozenTrial, value: float) -> FrozenTrial | None:
    """A trial as one of its kind alone; None where a scan chose what lies beyond a sampler's choices, or between them."""
    params, distributions = _without_kind(trial.params), _without_kind(trial.distributions)
    try:
        return create_trial(params=params, distributions=distributions, value=value)
    except ValueError:
        return None


def _without_kind(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: found for name, found in parameters.items() if name != _KIND}

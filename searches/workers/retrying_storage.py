"""A storage that waits for its database: a restart or an outage of some minutes interrupts no worker.

A call whose connection broke may have been carried out or not. Calls that may not be carried out twice look first.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from searches.connections import Retry

_NONCE = "nonce"  # system attribute of a trial: identifies the call that created it


def _retried(name: str) -> Any:
    """Return a method that calls the storage's until it is reached."""

    def call(self: RetryingStorage, *args: Any, **kwargs: Any) -> Any:
        return self._retry(lambda: getattr(self._storage, name)(*args, **kwargs))

    return call


class RetryingStorage(BaseStorage):
    """A storage whose calls are repeated while its database cannot be reached.

    Args:
        storage: the storage of a database.
        retry: repeats a call.

    Attributes:
        signature: user attributes of the trials that are created without any.
    """

    def __init__(self, storage: BaseStorage, retry: Retry | None = None) -> None:
        self.signature: dict[str, str] = {}
        self._storage, self._retry = storage, retry or Retry("study.storage: the database")

    create_new_study = _retried("create_new_study")
    delete_study = _retried("delete_study")
    set_study_user_attr = _retried("set_study_user_attr")
    set_study_system_attr = _retried("set_study_system_attr")
    get_study_id_from_name = _retried("get_study_id_from_name")
    get_study_name_from_id = _retried("get_study_name_from_id")
    get_study_directions = _retried("get_study_directions")
    get_study_user_attrs = _retried("get_study_user_attrs")
    get_study_system_attrs = _retried("get_study_system_attrs")
    get_all_studies = _retried("get_all_studies")
    set_trial_param = _retried("set_trial_param")
    get_trial_id_from_study_id_trial_number = _retried("get_trial_id_from_study_id_trial_number")
    set_trial_intermediate_value = _retried("set_trial_intermediate_value")
    set_trial_user_attr = _retried("set_trial_user_attr")
    set_trial_system_attr = _retried("set_trial_system_attr")
    get_trial = _retried("get_trial")
    get_all_trials = _retried("get_all_trials")
    get_best_trial = _retried("get_best_trial")
    remove_session = _retried("remove_session")

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Create a trial, once: a repeated call first looks for the trial of the call before."""
        signed = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=dict(self.signature))
        template = copy.copy(template_trial or signed)
        nonce = template.system_attrs.get(_NONCE) or uuid.uuid4().hex  # a proxy keeps that of the call that it passes on
        template.system_attrs = template.system_attrs | {_NONCE: nonce}
        is_repeated = False

        def create() -> int:
            nonlocal is_repeated
            if is_repeated:
                for trial in self._storage.get_all_trials(study_id, deepcopy=False):
                    if trial.system_attrs.get(_NONCE) == nonce:
                        return self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
            is_repeated = True
            return self._storage.create_new_trial(study_id, template)

        return self._retry(create)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """Set the state of a trial; a repeated call succeeds if the trial was finished like this."""
        is_repeated = False

        def update() -> bool:
            nonlocal is_repeated
            again, is_repeated = is_repeated, True
            try:
                return self._storage.set_trial_state_values(trial_id, state, values)
            except UpdateFinishedTrialError:
                stored = self._storage.get_trial(trial_id)
                if again and stored.state == state and (values is None or stored.values == list(values)):
                    return True
                raise

        return self._retry(update)

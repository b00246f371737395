"""The coordination rows of a study: trials of an auxiliary study in the same storage.

Every storage of Optuna can create a trial with its attributes in one step, numbers trials in the order of their creation,
and refuses to change a finished trial. These three make locks and queues without a clock: of the rows that wait for the
same thing the lowest is first, and of two processes that finish a row one is refused. The recipe is that of sequential nodes
(P. Hunt et al., ZooKeeper, USENIX ATC 2010, section 2.4).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

_SUFFIX = "-workers"
_PART = 30_000  # characters of an attribute; MySQL holds 64 kilobytes
_PARTS = "parts"


class Board:
    """Rows of one study. A row is ``RUNNING`` until it is finished as ``COMPLETE`` or ``FAIL``.

    Args:
        storage: of the study.
        name: of the study; its rows are the trials of a study of this name with ``-workers`` behind it.
    """

    def __init__(self, storage: BaseStorage, name: str) -> None:
        self._storage = storage
        optuna.create_study(study_name=name + _SUFFIX, storage=storage, load_if_exists=True)
        self._study = storage.get_study_id_from_name(name + _SUFFIX)

    def add(self, **attributes: Any) -> int:
        """Add a running row and return its number, which is higher than those of all rows before."""
        template = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=attributes)
        return self._storage.get_trial_number_from_id(self._storage.create_new_trial(self._study, template))

    def rows(self) -> list[FrozenTrial]:
        """Return all rows in the order of their creation."""
        return self._storage.get_all_trials(self._study, deepcopy=False)

    def set(self, number: int, name: str, value: Any) -> None:
        """Set an attribute of a row.

        Raises:
            UpdateFinishedTrialError: the row is finished.
        """
        self._storage.set_trial_user_attr(self._id(number), name, value)

    def finish(self, number: int, state: TrialState) -> bool:
        """Finish a row; return False if it was finished before."""
        try:
            # A value, since programs that show studies expect one of a complete trial.
            self._storage.set_trial_state_values(self._id(number), state, [0.0] if state == TrialState.COMPLETE else None)
        except UpdateFinishedTrialError:
            return False
        return True

    def publish(self, number: int, value: Any) -> None:
        """Complete a row with a plain value of any length.

        Raises:
            UpdateFinishedTrialError: the row is finished.
        """
        text = json.dumps(value)
        parts = [text[first : first + _PART] for first in range(0, len(text), _PART)]
        for place, part in enumerate(parts):
            self.set(number, f"part {place}", part)
        self.set(number, _PARTS, len(parts))
        if not self.finish(number, TrialState.COMPLETE):
            raise UpdateFinishedTrialError

    def _id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study, number)


def published(row: FrozenTrial) -> bool:
    """Return whether a row holds a published value."""
    return row.state == TrialState.COMPLETE and _PARTS in row.user_attrs


def value_of(row: FrozenTrial) -> Any:
    """Return the published value of a row."""
    return json.loads("".join(row.user_attrs[f"part {place}"] for place in range(row.user_attrs[_PARTS])))


def of_kind(rows: Sequence[FrozenTrial], kind: str, name: str | None = None) -> list[FrozenTrial]:
    """Return the rows of a kind, and of a name if one is given."""
    return [row for row in rows if row.user_attrs["kind"] == kind and name in (None, row.user_attrs.get("name"))]

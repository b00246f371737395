"""The coordination rows of a study: trials of an auxiliary study in the same storage.

Every storage of Optuna can create a trial with its attributes in one step, numbers trials in the order of their creation,
and refuses to change a finished trial. These three make locks and queues without a clock: of the rows that wait for the
same thing the lowest is first, and of two processes that finish a row one is refused. The recipe is that of sequential nodes
(P. Hunt et al., ZooKeeper, USENIX ATC 2010, section 2.4).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import TrialState

_SUFFIX = "-workers"
VALUE = "value"
"""The attribute of a row with its published value."""


class Row(NamedTuple):
    """A row: an identifier that is higher than those of all rows before, its state, and its attributes."""

    number: int
    state: TrialState
    user_attrs: dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """What a worker saw: all rows, in the order of their creation, and the numbers of those of workers that are alive."""

    rows: list[Row]
    live: frozenset[int]

    def held(self, kind: str, name: str | None = None) -> dict[int, int]:
        """Return the unfinished rows of a kind whose workers are alive, with these workers, by their numbers."""
        rows = [row for row in of_kind(self.rows, kind, name) if row.state == TrialState.RUNNING]
        return {row.number: row.user_attrs["worker"] for row in rows if row.user_attrs["worker"] in self.live}

    def published(self, name: str) -> list[Any]:
        """Return the values that were published by a name; after the first, workers use that one."""
        rows = [row for row in of_kind(self.rows, "claim", name) if row.state == TrialState.COMPLETE]
        return [row.user_attrs[VALUE] for row in rows if VALUE in row.user_attrs]


def has_board(storage: BaseStorage, name: str) -> bool:
    """Return whether a study has, or had, workers."""
    return name + _SUFFIX in optuna.get_all_study_names(storage)


class Board:
    """Rows of one study, which are the trials of a study of this name with ``-workers`` behind it.

    A row is ``RUNNING`` until it is finished as ``COMPLETE`` or ``FAIL``. Of a finished one, nothing changes any more.
    """

    def __init__(self, storage: BaseStorage, name: str) -> None:
        self._storage = storage
        self._study = optuna.create_study(study_name=name + _SUFFIX, storage=storage, load_if_exists=True)._study_id

    def add(self, **attributes: Any) -> int:
        """Add a running row and return its number, which is higher than those of all rows before."""
        template = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=attributes)
        return self._storage.create_new_trial(self._study, template)

    def rows(self) -> list[Row]:
        trials = self._storage.get_all_trials(self._study, deepcopy=False)
        return [Row(trial._trial_id, trial.state, trial.user_attrs) for trial in trials]

    def set(self, number: int, name: str, value: Any) -> None:
        with contextlib.suppress(UpdateFinishedTrialError):
            self._storage.set_trial_user_attr(number, name, value)

    def finish(self, number: int, state: TrialState) -> None:
        with contextlib.suppress(UpdateFinishedTrialError):
            # A value, because programs that show studies expect one of a complete trial.
            self._storage.set_trial_state_values(number, state, [0.0] if state == TrialState.COMPLETE else None)


def of_kind(rows: Sequence[Row], kind: str, name: str | None = None) -> list[Row]:
    return [row for row in rows if row.user_attrs["kind"] == kind and name in (None, row.user_attrs.get("name"))]

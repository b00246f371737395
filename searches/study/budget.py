"""The seconds of a search: its budget with the share of each stage, and those of artifacts that studies share.

A share ends at a time, not after a duration: what a stage leaves unspent belongs to the next one. Seconds of earlier runs of
the same study count.

Continuations and cost profiles lie in one folder for all studies, and outlive a killed process. A clock that runs while
they are made would never count those that another study made, and would lose those of a killed process. So a study records
each artifact when it first uses it, with the seconds that are stored with it. Clocks leave out artifacts that were made
while they ran.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

import optuna

from searches.app.interrupt import defer_interrupt
from searches.progress import say
from searches.workers.pool import ALONE, Workers

OPENING, PREDICTIONS, TRIALS, FINALS = "first comparison", "predictions", "trials", "finals"
_ENDS = {OPENING: 0.23, PREDICTIONS: 0.45, TRIALS: 0.6, FINALS: 0.97}
"""The share of the budget that has passed when a stage must end. What is left after the finals writes the results."""
_SPENT = "spent_seconds"
"""User attribute of a study: the seconds that its runs took, up to the last finished step."""
_LEFT_OUT, _SHARED, _PREPARATION = "left_out:", "shared_seconds:", "preparation_seconds"
"""The beginnings of user attributes of a study: what a stage left out, seconds of a shared artifact, seconds of a worker."""


def left_out(study: optuna.Study) -> list[str]:
    """Return what the stages of a study had no time for, as sentences."""
    names = (name for name, what in study.user_attrs.items() if name.startswith(_LEFT_OUT) and what)
    return [f"{name.removeprefix(_LEFT_OUT).capitalize()}: {study.user_attrs[name]}." for name in names]


class Budget:
    """The seconds of a search, which its study keeps; without a limit if they are None.

    ``started`` is the start of this process, on the clock of ``time.monotonic``. Of the processes that work on the study,
    only the first (``leads``) counts the seconds of its start, because the others start at the same time.
    """

    def __init__(self, study: optuna.Study, seconds: float | None, started: float, leads: bool = True) -> None:
        self._study, self._seconds = study, seconds
        self.seconds_here = 0.0  # that this process spent on shared artifacts
        self.started = (started if leads else time.monotonic()) - float(study.user_attrs.get(_SPENT, 0.0))

    def left(self, stage: str) -> float:
        """Return the seconds until a stage must end, 0 if it must have ended; infinite without a limit."""
        if self._seconds is None:
            return math.inf
        return max(0.0, _ENDS[stage] * self._seconds - self.spent)

    @property
    def spent(self) -> float:
        """Seconds since the start, those of earlier runs included."""
        return time.monotonic() - self.started

    def is_over(self, stage: str) -> bool:
        return self.left(stage) == 0.0

    @defer_interrupt()
    def leave_out(self, stage: str, what: str) -> None:
        """Say and store what a stage had no time for; see :func:`left_out`."""
        say(f"{stage}: {what}")
        self._study.set_user_attr(f"{_LEFT_OUT}{stage}", what)

    def begin(self, stage: str) -> None:
        """Forget what an earlier run of a stage had no time for."""
        if self._study.user_attrs.get(f"{_LEFT_OUT}{stage}"):
            self._study.set_user_attr(f"{_LEFT_OUT}{stage}", "")

    @defer_interrupt()
    def save(self) -> None:
        """Store the seconds that were spent, after a step. Other workers may have stored more of the same time."""
        if (spent := self.spent) > float(self._study.user_attrs.get(_SPENT, 0.0)):
            self._study.set_user_attr(_SPENT, spent)

    def use(self, name: str, seconds: float, seconds_here: float = 0.0) -> None:
        """Record an artifact, unless it is recorded with these seconds already, which grow if an interrupted work continues.

        ``seconds_here`` is the part of them that this process spent while clocks ran.
        """
        if recorded_seconds(self._study).get(name) != seconds:
            with defer_interrupt():
                self._study.set_user_attr(f"{_SHARED}{name}", seconds)
        self.seconds_here += seconds_here

    @contextlib.contextmanager
    def preparing(self, pool: Workers = ALONE) -> Iterator[None]:
        """Count the seconds of a block outside trials, without those of shared artifacts and of waiting for others."""
        name = _PREPARATION if pool.alone else f"{_PREPARATION}:{pool.name}"
        start = time.monotonic() - self.seconds_here - pool.waited_seconds
        try:
            yield
        finally:
            with defer_interrupt():
                seconds = time.monotonic() - self.seconds_here - pool.waited_seconds - start
                self._study.set_user_attr(name, self._study.user_attrs.get(name, 0.0) + max(0.0, seconds))


def preparation_seconds(study: optuna.Study) -> float:
    """Return the seconds outside trials, of all workers together."""
    return sum(float(value) for name, value in study.user_attrs.items() if name.startswith(_PREPARATION))


def recorded_seconds(study: optuna.Study) -> dict[str, float]:
    """Return the seconds of each shared artifact that a study used, by name."""
    attributes = study.user_attrs.items()
    return {name.removeprefix(_SHARED): float(value) for name, value in attributes if name.startswith(_SHARED)}

"""The budget of a search in seconds, and the share of each stage.

A share ends at a time, not after a duration: what a stage leaves unspent belongs to the next one. Seconds of earlier runs of
the same study count.
"""

from __future__ import annotations

import math
import time

import optuna

from searches.app.interrupt import defer_interrupt
from searches.progress import say

OPENING, PREDICTIONS, TRIALS, FINALS = "first comparison", "predictions", "trials", "finals"
_ENDS = {OPENING: 0.25, PREDICTIONS: 0.45, TRIALS: 0.6, FINALS: 0.97}
"""The share of the budget that has passed when a stage must end. What is left after the finals writes the results."""
_SPENT = "spent_seconds"
"""User attribute of a study: the seconds that its runs took, up to the last finished step."""
_LEFT_OUT = "left_out:"


def left_out(study: optuna.Study) -> list[str]:
    """Return what the stages of a study had no time for, as sentences."""
    names = (name for name, what in study.user_attrs.items() if name.startswith(_LEFT_OUT) and what)
    return [f"{name.removeprefix(_LEFT_OUT).capitalize()}: {study.user_attrs[name]}." for name in names]


class Budget:
    """The seconds of a search.

    Args:
        study: keeps the seconds that were spent.
        seconds: of the whole search; None for no limit.
        started: start of this process, on the clock of ``time.monotonic``.
        leads: whether this process is the first of those that work on the study. The others count no second of their own
            start, because the first has counted it.
    """

    def __init__(self, study: optuna.Study, seconds: float | None, started: float, leads: bool = True) -> None:
        self._study, self._seconds = study, seconds
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
        """Return whether a stage must end."""
        return self.left(stage) == 0.0

    def leave_out(self, stage: str, what: str) -> None:
        """Say and store what a stage had no time for; see :func:`left_out`."""
        say(f"{stage}: {what}")
        with defer_interrupt():
            self._study.set_user_attr(f"{_LEFT_OUT}{stage}", what)

    def begin(self, stage: str) -> None:
        """Forget what an earlier run of a stage had no time for."""
        if self._study.user_attrs.get(f"{_LEFT_OUT}{stage}"):
            self._study.set_user_attr(f"{_LEFT_OUT}{stage}", "")

    def save(self) -> None:
        """Store the seconds that were spent, after a step. Other workers may have stored more of the same time."""
        with defer_interrupt():
            if (spent := self.spent) > float(self._study.user_attrs.get(_SPENT, 0.0)):
                self._study.set_user_attr(_SPENT, spent)

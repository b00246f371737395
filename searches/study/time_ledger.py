"""Seconds that a study's shared artifacts took, counted once for each study that uses them.

Bridges, texts and cost profiles lie in one folder for all studies, and outlive a killed process. A clock that runs while
they are made would never count those that another study made, and would lose those of a killed process. So a study records
each artifact when it first uses it, with the seconds that are stored with it. Clocks leave out artifacts that were made
while they ran.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import optuna

from searches.app.interrupt import defer_interrupt

KEPT_SECONDS = "kept_seconds"
"""User attribute of a trial: the part of its seconds that ledgers count, too."""
FITS = "fit"
"""The kind of fitted artifacts."""
SHARED = "shared"
"""The kind of artifacts of a target: its continuations of prompts, its training texts, cost profiles."""


class TimeLedger:
    """The shared artifacts of one kind, ``FITS`` or ``SHARED``, that a study used, stored in its user attributes.

    Attributes:
        seconds_here: seconds that this process spent on artifacts of the ledger.
    """

    def __init__(self, study: optuna.Study, kind: str = FITS) -> None:
        self._study, self._kind, self.seconds_here = study, kind, 0.0
        self._seconds = recorded_seconds(study, kind)

    def use(self, name: str, seconds: float, seconds_here: float = 0.0) -> None:
        """Record an artifact, unless it is recorded with these seconds already, which grow if an interrupted work continues.

        ``seconds_here`` is the part of them that this process spent while clocks ran.
        """
        if self._seconds.get(name) != seconds:
            place = list(self._seconds).index(name) if name in self._seconds else len(self._seconds)
            with defer_interrupt():
                self._study.set_user_attr(f"{self._kind}:{name}", [place, seconds])
            self._seconds[name] = seconds
        self.seconds_here += seconds_here


@contextlib.contextmanager
def record_shared_seconds(trial: optuna.Trial, ledgers: Sequence[TimeLedger]) -> Iterator[None]:
    """Store with a trial the seconds that a block spends on artifacts of the ledgers."""
    before = total_seconds_here(ledgers)
    try:
        yield
    finally:
        if total_seconds_here(ledgers) > before:
            with defer_interrupt():
                trial.set_user_attr(KEPT_SECONDS, total_seconds_here(ledgers) - before)


def total_seconds_here(ledgers: Sequence[TimeLedger]) -> float:
    """Return the seconds that this process spent on artifacts of any of the ledgers."""
    return sum(ledger.seconds_here for ledger in ledgers)


def recorded_seconds(study: optuna.Study, kind: str) -> dict[str, float]:
    """Return the seconds of each artifact of a kind by name, in the order in which the study first used them."""
    prefix = f"{kind}:"
    rows = [(*value, name.removeprefix(prefix)) for name, value in study.user_attrs.items() if name.startswith(prefix)]
    return {name: float(seconds) for _, seconds, name in sorted(rows)}

"""What did that take which a study used and others may have made? Each is counted once, and whatever was killed since.

Bridges, texts and cost profiles lie in one folder for all studies, and outlive a kill; a clock that runs while they are made
would count those of other studies never, and lose those of a killed process. So each is written down with the study when it
first uses it, with the seconds that are kept beside it, and clocks leave out what was made while they ran.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import optuna

from searches.app.interrupt import undisturbed

KEPT_SECONDS = "kept_seconds"
"""Of a trial: what was written down while it ran, which its seconds have in them and the ledger, too."""
FITS = "fit"
"""What is fitted: bridges."""
SHARED = "shared"
"""What is made of a target for whoever asks: its continuations of prompts, its own texts, cost profiles."""


class TimeLedger:
    """What a study used that is kept for others, too.

    Args:
        study: it is written down with it.
        kind: ``FITS`` or ``SHARED``.

    Attributes:
        here: seconds that this process has spent on what is written down.
    """

    def __init__(self, study: optuna.Study, kind: str = FITS) -> None:
        self._study, self._kind, self.here = study, kind, 0.0
        self._known = seconds_of(study, kind)

    def use(self, name: str, seconds: float, here: float = 0.0) -> None:
        """Write something down, unless it is.

        Args:
            name: of it.
            seconds: that it took; so far, where it was interrupted and goes on later.
            here: so many of them were spent in this process, while clocks ran.
        """
        if self._known.get(name) != seconds:
            place = list(self._known).index(name) if name in self._known else len(self._known)
            with undisturbed():
                self._study.set_user_attr(f"{self._kind}:{name}", [place, seconds])
            self._known[name] = seconds
        self.here += here


@contextlib.contextmanager
def noted(trial: optuna.Trial, ledgers: Sequence[TimeLedger]) -> Iterator[None]:
    """Note with a trial what is written down while a block runs."""
    before = spent_here(ledgers)
    try:
        yield
    finally:
        if spent_here(ledgers) > before:
            with undisturbed():
                trial.set_user_attr(KEPT_SECONDS, spent_here(ledgers) - before)


def spent_here(ledgers: Sequence[TimeLedger]) -> float:
    """What this process has spent on what is written down in any of them."""
    return sum(ledger.here for ledger in ledgers)


def seconds_of(study: optuna.Study, kind: str) -> dict[str, float]:
    """The seconds of all of a kind that a study used, by name, in the order in which it first used them."""
    begin = f"{kind}:"
    found = [(*value, name.removeprefix(begin)) for name, value in study.user_attrs.items() if name.startswith(begin)]
    return {name: float(took) for _, took, name in sorted(found)}

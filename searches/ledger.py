"""What did the fits take that a study used? Each is counted once, whoever made it, and whatever was killed since.

Bridges lie on one shelf for all studies, and outlive a kill; a clock that runs while they are fitted would count those of
other studies never, and lose those of a killed process. So each is written down with the study when it first uses it, with
the seconds that are kept beside it, and clocks leave out what was fitted while they ran.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import optuna

from .interrupt import undisturbed

FIT_SECONDS = "fit_seconds"
"""Of a trial: what was fitted while it ran, which its seconds have in them and the ledger, too."""
_FIT = "fit:"


class FitLedger:
    """The fits that a study used.

    Args:
        study: they are written down with it.

    Attributes:
        here: seconds that this process has spent on fits which are written down.
    """

    def __init__(self, study: optuna.Study) -> None:
        self._study, self.here = study, 0.0
        self._known = fits_of(study)

    def use(self, name: str, seconds: float, here: float = 0.0) -> None:
        """Write a fit down, unless it is.

        Args:
            name: of the fit.
            seconds: that it took; so far, where it was interrupted and goes on later.
            here: so many of them were spent in this process, while clocks ran.
        """
        if self._known.get(name) != seconds:
            place = list(self._known).index(name) if name in self._known else len(self._known)
            with undisturbed():
                self._study.set_user_attr(_FIT + name, [place, seconds])
            self._known[name] = seconds
            self.here += here


@contextlib.contextmanager
def noted(trial: optuna.Trial, fits: FitLedger | None) -> Iterator[None]:
    """Note with a trial what is written down while a block runs; None writes nothing down."""
    before = 0.0 if fits is None else fits.here
    try:
        yield
    finally:
        if fits is not None and fits.here > before:
            with undisturbed():
                trial.set_user_attr(FIT_SECONDS, fits.here - before)


def fits_of(study: optuna.Study) -> dict[str, float]:
    """The seconds of every fit that a study used, by name, in the order in which it first used them."""
    found = [(*value, name.removeprefix(_FIT)) for name, value in study.user_attrs.items() if name.startswith(_FIT)]
    return {name: float(took) for _, took, name in sorted(found)}

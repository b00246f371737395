"""The only process of a study, which needs no agreement with others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from searches.workers.board import Look
from searches.workers.crew import Crew


class Alone:
    """A process that works on a study alone. Its methods are those of :class:`~searches.workers.crew.Crew`."""

    alone = True
    seed = 0
    waited_seconds = 0.0

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def sign(self, trial: optuna.Trial) -> None:
        """Leave the trial as it is."""

    def orphans(self, trials: Iterable[FrozenTrial], look: Look | None = None, is_idle: bool = False) -> list[FrozenTrial]:
        """Return all running trials: a killed process left them."""
        return [trial for trial in trials if trial.state == TrialState.RUNNING]

    def leads(self) -> bool:
        """Return True."""
        return True

    def leave(self) -> bool:
        """Return False, as nobody else is there."""
        return False

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[None]:
        """Hold the claim at once."""
        yield

    def share(self, name: str, work: Callable[[], Any]) -> Any:
        """Do the work."""
        return work()

    def share_all(self, names: Iterable[str], work: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
        """Do all work, one piece after the other."""
        for name in names:
            yield name, work(name)

    def check(self, name: str) -> None:
        """Return, as nobody else can have the claim."""


Workers = Crew | Alone
ALONE = Alone()

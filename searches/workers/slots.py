"""Slots of a study's workers: a study ends with the wanted number of finished trials, whatever is killed.

A worker takes a slot for each trial. A slot whose trial finished, or may still finish, counts; a slot whose trial failed
does not. A worker runs a trial if fewer than the wanted number of slots before its own count, stops if so many trials have
finished, and waits otherwise. The state of the trial decides: it changes once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import optuna
from optuna.trial import FrozenTrial, TrialState

from searches.workers.board import Board, Snapshot, of_kind
from searches.workers.pool import WorkerPool, Workers

_CLOSED = "closed"
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
Repair = Callable[[Sequence[FrozenTrial], Snapshot], bool]


class Slot:
    """The right to run one trial; a context that closes it. Its row is on a board, if other processes take slots."""

    def __init__(self, board: Board | None = None, number: int = -1) -> None:
        self._board, self.number = board, number

    @classmethod
    def add(cls, pool: WorkerPool) -> Slot:
        """Return a new slot behind all others."""
        return cls(pool.board, pool.board.add(kind="slot", worker=pool.worker))

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *_: object) -> None:
        if self._board is not None:
            self._board.finish(self.number, TrialState.COMPLETE)  # whether it counts, its trial tells

    def begin(self, trial: optuna.Trial) -> None:
        """Store the trial of the slot, before it is measured; raise UpdateFinishedTrialError if its worker seemed dead."""
        if self._board is not None:
            self._board.set(self.number, "trial", trial.number)


def take_slot(pool: Workers, study: optuna.Study, wanted: int, repair: Repair = lambda *_: False) -> Slot | None:
    """Take the next slot of a study; return None once it has the wanted number of finished trials, or is closed.

    Finished trials without a slot, from before the study had workers, count. ``repair`` is called with the trials and a
    snapshot that was taken after them; it returns whether it changed any trial.
    """
    if not isinstance(pool, WorkerPool):
        return Slot() if len(study.get_trials(deepcopy=False, states=FINISHED)) < wanted else None
    slot, counted = Slot.add(pool), wanted

    def is_decided() -> bool:
        nonlocal slot, counted
        trials = study.get_trials(deepcopy=False)  # first: every trial that has finished here has its slot below
        snapshot = pool.snapshot()
        if repair(trials, snapshot):
            return False
        if not any(snapshot.is_held(row) for row in of_kind(snapshot.rows, "slot") if row.number == slot.number):
            pool.stay()
            slot = Slot.add(pool)  # its worker was presumed dead
            return False
        if any(snapshot.is_held(row) and row.number < slot.number for row in of_kind(snapshot.rows, _CLOSED)):
            counted = wanted
            return True
        counted = _count(trials, snapshot, slot.number)
        return counted < wanted or sum(trial.state in FINISHED for trial in trials) >= wanted

    try:
        pool.wait(is_decided)
    except BaseException:
        slot.__exit__()
        raise
    if counted < wanted:
        return slot
    slot.__exit__()
    return None


def close_slots(pool: Workers) -> None:
    """Let no worker take a further slot while this one is there, because the time for trials is over."""
    if isinstance(pool, WorkerPool):
        pool.board.add(kind=_CLOSED, worker=pool.worker)


def wait_for_slots(pool: Workers) -> None:
    """Wait until no other worker that is alive runs a trial, or records one."""
    if not isinstance(pool, WorkerPool):
        return

    def is_idle() -> bool:
        snapshot = pool.snapshot()
        return not any(
            snapshot.is_held(row) and row.user_attrs["worker"] != pool.worker for row in of_kind(snapshot.rows, "slot")
        )

    pool.wait(is_idle)


def _count(trials: Sequence[FrozenTrial], snapshot: Snapshot, number: int) -> int:
    """Return how many trials before a slot have finished or may finish."""
    states = {trial.number: trial.state for trial in trials}
    slots = of_kind(snapshot.rows, "slot")
    with_slot = {row.user_attrs.get("trial") for row in slots}
    counted = sum(trial.state in FINISHED and trial.number not in with_slot for trial in trials)
    for row in slots:
        if row.number >= number:
            break
        if "trial" in row.user_attrs:
            counted += states.get(row.user_attrs["trial"]) != TrialState.FAIL
        else:  # that of a dead worker counts until it is finished: its worker may live after all and begin a trial
            counted += row.state == TrialState.RUNNING
    return counted

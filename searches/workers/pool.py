"""The workers of one study, which agree through the study's storage alone, and the only worker of one.

A worker is alive while its counter grows. An observer presumes it dead after the counter stood still during some of the
observer's own beats. No clock is compared with another one, and while the storage is away, nobody beats and nobody dies.
What a dead worker held passes to the next in line. A worker that was presumed dead and is not notices it, because its rows
are finished, and joins again.

The rows of a :class:`Board` are trials of an auxiliary study in the same storage. Every storage of Optuna can create a trial
with its attributes in one step, numbers trials in the order of their creation, and refuses to change a finished trial. These
three make locks and queues without a clock: of the rows that wait for the same thing the lowest is first, and of two
processes that finish a row one is refused. The recipe is that of sequential nodes (P. Hunt et al., ZooKeeper, USENIX ATC
2010, section 2.4).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from searches.app.interrupt import defer_interrupt
from searches.connections import RetryingStorage, is_unreachable
from searches.tracking.names import DEVICE, WORKER

BEAT_SECONDS = 10.0
PATIENCE = 6  # beats of the observer
_VALUE = "value"  # the attribute of a row with its published value
_SUFFIX = "-workers"
_SEED_STEP = 10_007
_LONGEST_PAUSE = 2.0  # seconds between two looks of a waiting worker


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
        return [row.user_attrs[_VALUE] for row in rows if _VALUE in row.user_attrs]


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


class LeaseLost(Exception):
    """The end of a claim whose worker was presumed dead; another worker has it now."""


class Workers:
    """What the workers of a study agree on, here for a process that works on it alone."""

    alone = True
    name: str | None = None  # of the worker, if there are several
    seed = 0  # for the sampler; that of each worker differs
    waited_seconds = 0.0  # for other workers

    def leave(self) -> bool:
        """Leave the study, and return whether other workers may still be there; of all that leave, the last finds none."""
        return False

    def leads(self) -> bool:
        """Return whether this is the worker that joined first of those that are alive."""
        return True

    def sign(self, trial: optuna.Trial) -> None:
        """Store with a trial that this worker runs it."""

    def orphans(self, trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
        """Return the running trials whose worker is dead; without other workers those that a killed process left."""
        return [trial for trial in trials if trial.state == TrialState.RUNNING]

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[None]:
        """Wait until no other worker holds a claim of this name, then hold it."""
        yield

    def share(self, name: str, work: Callable[[], Any]) -> Any:
        """Return the plain value of some work that one worker does for the study; another after :class:`LeaseLost`."""
        return work()

    def share_all(self, names: Iterable[str], work: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
        """Yield the name and the value of each piece of work as they become known; those that no other worker does first."""
        for name in names:
            yield name, work(name)

    def check(self, name: str) -> None:
        """Check that this worker holds the claim of a name; raise :class:`LeaseLost` if it was presumed dead."""

    def close(self) -> None:
        """Let no worker begin a further trial while this one is there, because the time for trials is over."""

    def is_closed(self) -> bool:
        """Return whether a worker that is there has found the time for trials over."""
        return False

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until a condition holds, which is tested again and again."""
        start, pause = time.monotonic(), 0.05
        while True:
            with defer_interrupt():
                if done():
                    break
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        self.waited_seconds += time.monotonic() - start


ALONE = Workers()


class WorkerPool(Workers):
    """A worker among the others of its study; a context that it joins and leaves."""

    alone = False
    name: str

    def __init__(
        self, storage: BaseStorage, study: str, device: str, beat_seconds: float = BEAT_SECONDS, patience: int = PATIENCE
    ) -> None:
        self.board, self.device, self._storage = Board(storage, study), device, storage
        self._process, self._beat_seconds, self._patience = this_process(), beat_seconds, patience
        self._ended, self._joining = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._beat_on, name="beats of a worker", daemon=True)
        self._beats = 0
        self._seen: dict[object, tuple[object, int]] = {}  # what was seen, and the own beat at which it was first seen so

    def __enter__(self) -> Self:
        self._join()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> bool:
        self._ended.set()
        self._thread.join(self._beat_seconds)  # a beat may wait for the storage
        try:
            with self._joining:
                self.board.finish(self.worker, TrialState.COMPLETE)
            return bool(self.snapshot().live)
        except Exception as error:
            if not is_unreachable(error):
                raise
            return True

    def snapshot(self) -> Snapshot:
        """Return the rows and the live workers; finish the rows of workers that left, or ended on this machine."""
        rows = self.board.rows()
        running = [row for row in rows if row.state == TrialState.RUNNING]
        workers = of_kind(running, "worker")
        ended = {row.number for row in workers if has_ended(row.user_attrs["process"])}
        live = frozenset(row.number for row in workers) - ended
        for row in running:
            if row.user_attrs.get("worker", row.number) not in live:
                self.board.finish(row.number, TrialState.FAIL)
        return Snapshot(rows, live)

    def leads(self) -> bool:
        return self.worker == min(self.snapshot().live, default=self.worker)

    def sign(self, trial: optuna.Trial) -> None:
        for name, value in self._signature().items():
            if trial.user_attrs.get(name) != value:
                trial.set_user_attr(name, value)

    def orphans(self, trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
        running = super().orphans(trials)
        live = self.snapshot().live if running else frozenset()

        def is_orphan(trial: FrozenTrial) -> bool:
            if WORKER in trial.user_attrs:
                return int(trial.user_attrs[WORKER].rpartition("/")[2]) not in live
            return self._stands_still(("trial", trial.number), None)  # taken by a worker that died at once, or this moment

        return list(filter(is_orphan, running))

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[None]:
        row = self._stand_in_line(name)
        try:
            yield
        finally:
            self.board.finish(row, TrialState.COMPLETE)

    def share(self, name: str, work: Callable[[], Any]) -> Any:
        while not (values := self.snapshot().published(name)):
            row = self._stand_in_line(name)
            try:
                if not self.snapshot().published(name):
                    self.board.set(row, _VALUE, work())
                    self.board.finish(row, TrialState.COMPLETE)
            except LeaseLost:
                pass  # another worker does it
            finally:
                self.board.finish(row, TrialState.FAIL)
        return values[0]

    def share_all(self, names: Iterable[str], work: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
        left = list[str]()
        for name in names:
            snapshot = self.snapshot()
            if snapshot.held("claim", name) and not snapshot.published(name):
                left.append(name)
            else:
                yield name, self.share(name, partial(work, name))
        for name in left:
            yield name, self.share(name, partial(work, name))

    def check(self, name: str) -> None:
        if self.worker not in self.snapshot().held("claim", name).values():
            raise LeaseLost(name)

    def close(self) -> None:
        self.board.add(kind="closed", worker=self.worker)

    def is_closed(self) -> bool:
        return bool(self.snapshot().held("closed"))

    def _stand_in_line(self, name: str) -> int:
        """Wait until a row of this worker is the first of a name, or a value of the name is published; return the row."""
        while True:
            row = self.board.add(kind="claim", name=name, worker=self.worker)
            try:
                self.wait(partial(self._is_first, name, row))
            except LeaseLost:
                continue
            except BaseException:
                self.board.finish(row, TrialState.FAIL)
                raise
            return row

    def _is_first(self, name: str, row: int) -> bool:
        snapshot = self.snapshot()
        if snapshot.published(name):
            return True
        held = snapshot.held("claim", name)
        if row not in held:
            self.stay()
            raise LeaseLost(name)
        return row == min(held)

    def stay(self) -> Snapshot:
        """Join again if this worker was presumed dead; return what was seen before."""
        with self._joining:
            snapshot = self.snapshot()
            if self.worker not in snapshot.live and not self._ended.is_set():
                self._join()
        return snapshot

    def _join(self) -> None:
        row = self.board.add(kind="worker", process=self._process, beat=0)
        self.worker, self.name, self.seed = row, f"{self._process['host']}/{row}", _SEED_STEP * (row % _SEED_STEP)
        if isinstance(self._storage, RetryingStorage):
            self._storage.signature = self._signature()

    def _signature(self) -> dict[str, str]:
        return {WORKER: self.name, DEVICE: self.device}

    def _beat_on(self) -> None:
        while not self._ended.wait(self._beat_seconds):
            with contextlib.suppress(Exception):  # the thread that works reports what is wrong with the storage
                self._beat()

    def _beat(self) -> None:
        """Show that this worker is alive, and mark those as dead that have not shown it for a while."""
        self.board.set(self.worker, "beat", self._beats)
        self._beats += 1
        for row in of_kind(self.stay().rows, "worker"):
            is_other = row.state == TrialState.RUNNING and row.number != self.worker
            if is_other and self._stands_still(row.number, row.user_attrs["beat"]):
                self.board.finish(row.number, TrialState.FAIL)

    def _stands_still(self, what: object, sign: object) -> bool:
        """Return whether something has shown the same sign for as many own beats as a worker may miss."""
        if what not in self._seen or self._seen[what][0] != sign:
            self._seen[what] = sign, self._beats
        return self._beats - self._seen[what][1] >= self._patience


def this_process() -> dict[str, Any]:
    """Return the identity of this process: ``host``, ``pid``, ``started``, and ``machine``, which is empty if unknown.

    ``machine`` holds the start of the kernel and the namespace of process numbers: containers may share a host's name.
    """
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": start_of(os.getpid()), "machine": _machine()}


def has_ended(identity: Mapping[str, Any]) -> bool:
    """Return True if a process of this machine has ended; False if it runs, or cannot be seen from here."""
    machine = _machine()
    return bool(machine) and identity["machine"] == machine and start_of(identity["pid"]) != identity["started"]


@cache
def _machine() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_of(pid: int) -> str:
    """Return the start of a process in clock ticks since the machine's; empty if it has ended, or without ``/proc``."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # fields 3 (state) and 22 (start time) of proc(5)

"""One worker of ``searches.evaluate.scale``: the program ``searches.layerskip``, with a stopwatch on its parts."""

from __future__ import annotations

import functools
import json
import os
import select
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, thread_time
from types import SimpleNamespace
from typing import Any, NoReturn

from optuna.samplers import TPESampler

import searches.sweep
from layerskip.files import write_json
from searches.app import process
from searches.app.application import run
from searches.app.checks import InputError
from searches.app.retry import Retry
from searches.evaluate import simulated_backend
from searches.report.live import LiveView
from searches.study import opening, study
from searches.study.objective import Objective
from searches.tracking.tracker import Tracker
from searches.workers import crew
from searches.workers.crew import Crew
from searches.workers.slots import Slot

DECODING, SAMPLING, TRACKING, PAGE = "decoding", "sampling", "tracking", "page"
STORAGE, COORDINATION, WAITING, REST = "storage", "coordination", "waiting", "rest"
TRIALS, SECONDS, PROCESSOR = "trials", "seconds", "processor"
"""Keys of a worker's times: the number of trials, and the seconds of the clock and of the processor by the kinds above."""
_OUTSIDE = "outside"  # of the loop over trials
_SAMPLING = ("infer_relative_search_space", "sample_relative", "sample_independent", "before_trial", "after_trial")
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Job:
    """A worker's command line and places.

    Args:
        overrides: of ``searches.layerskip``.
        folder: working directory, created.
        log: file of its output.
        times: file of its seconds, in JSON, written when it ends by itself.
        machine: name of its machine. Workers see at once which processes of their own machine have ended.
        beat_seconds: between two signs of life.
        hours_ahead: hours by which its clock is ahead.
    """

    overrides: tuple[str, ...]
    folder: str
    log: str
    times: str
    machine: str
    beat_seconds: float
    hours_ahead: float = 0.0


def work(job: Job, is_ahead: bool = False) -> None:
    """Run the program in this process, which ends with its exit code."""
    if job.hours_ahead and not is_ahead:
        _restart_ahead(job)
    if is_ahead:  # libfaketime moves the deadlines by which Python 3.11 and newer sleep
        _replace(time, "sleep", lambda seconds: select.select([], [], [], seconds))
    os.makedirs(job.folder, exist_ok=True)
    os.chdir(job.folder)
    output = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    _replace(process, "_machine", lambda: job.machine)
    _replace(opening, "Crew", functools.partial(Crew, beat_seconds=job.beat_seconds))
    stopwatch = Stopwatch()
    stopwatch.attach()
    sys.argv = ["layerskip", *job.overrides]
    try:
        run("layerskip", searches.sweep.search)
    finally:
        write_json(Path(job.times), stopwatch.times())


def _replace(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def clock_library() -> str:
    """Return the path of libfaketime, which shows a process another time of day.

    Raises:
        InputError: it is not installed.
    """
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not found:
        raise InputError("scenarios.hours_ahead: libfaketime is missing; apt-get install faketime installs it")
    return str(found[0])


def _restart_ahead(job: Job) -> NoReturn:
    """Replace this process by an interpreter whose time of day is ahead; its other clocks are right."""
    clock = {"LD_PRELOAD": clock_library(), "FAKETIME": f"+{job.hours_ahead:g}h", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    command = [sys.executable, "-m", __name__, json.dumps(asdict(job))]
    os.execve(sys.executable, command, os.environ | clock | {"PYTHONPATH": str(_ROOT)})


class Stopwatch:
    """Seconds of the main thread in the loop over trials, each in the innermost kind of work."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._processor: defaultdict[str, float] = defaultdict(float)
        self._trials = 0
        self._kind, self._since, self._since_processor = _OUTSIDE, monotonic(), thread_time()

    def times(self) -> dict[str, Any]:
        """Return the number of trials, and the seconds of the clock and of the processor by kind of work."""
        return {TRIALS: self._trials, SECONDS: dict(self._seconds), PROCESSOR: dict(self._processor)}

    def attach(self) -> None:
        """Replace the functions that are timed by timed ones, in this process."""
        self._time(searches.sweep, "run_trials", REST, within=_OUTSIDE)
        self._time(simulated_backend, "pause", DECODING)
        for name in _SAMPLING:
            self._time(TPESampler, name, SAMPLING)
        self._time(Tracker, "record", TRACKING)
        self._time(LiveView, "refresh", PAGE)
        self._time(Retry, "__call__", STORAGE, within=REST)
        for owner, name in (
            (study, "take_slot"),
            (study, "_refuse_duplicate"),
            (Slot, "begin"),
            (Slot, "__exit__"),
            (Crew, "sign"),
        ):
            self._time(owner, name, COORDINATION)
        clock = SimpleNamespace(**vars(time))
        _replace(crew, "time", clock)
        self._time(clock, "sleep", WAITING)
        measured = Objective.__call__

        def counted(*arguments: Any) -> float:
            self._trials += 1
            return measured(*arguments)

        _replace(Objective, "__call__", counted)

    def _time(self, owner: Any, name: str, kind: str, within: str | None = None) -> None:
        """Time a function, only where the surrounding kind is ``within``, or any but outside if that is None."""
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def timed(*arguments: Any, **named: Any) -> Any:
            before = self._kind
            is_timed = before == within if within is not None else before != _OUTSIDE
            if not is_timed or threading.current_thread() is not threading.main_thread():
                return original(*arguments, **named)
            self._switch(kind)
            try:
                return original(*arguments, **named)
            finally:
                self._switch(before)

        _replace(owner, name, timed)

    def _switch(self, kind: str) -> None:
        now, processor = monotonic(), thread_time()
        if self._kind != _OUTSIDE:
            self._seconds[self._kind] += now - self._since
            self._processor[self._kind] += processor - self._since_processor
        self._kind, self._since, self._since_processor = kind, now, processor


if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    work(Job(**fields | {"overrides": tuple(fields["overrides"])}), is_ahead=True)

"""One worker of ``searches.evaluate.scale``: the program ``searches.layerskip``, with a stopwatch on its parts."""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

from optuna.samplers import TPESampler

import searches.sweep
from layerskip.files import write_json
from searches.app.application import run
from searches.app.checks import InputError
from searches.evaluate import simulated_backend
from searches.report.live import LiveView
from searches.study.objective import Objective
from searches.tracking.tracker import Tracker

DECODING, SAMPLING, TRACKING, PAGE, COORDINATION = "decoding", "sampling", "tracking", "page", "coordination"
TRIALS, SECONDS = "trials", "seconds"
"""Keys of the times of a worker, beside the kinds above: the number of trials that it ran, and the seconds of its loop."""
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Job:
    """A worker's command line and places.

    Args:
        overrides: of ``searches.layerskip``.
        folder: working directory, created.
        log: file of its output.
        times: file of its seconds, in JSON, written when it ends by itself.
        hours_ahead: hours by which its clock is ahead.
    """

    overrides: tuple[str, ...]
    folder: Path
    log: Path
    times: Path
    hours_ahead: float = 0.0


def work(job: Job) -> None:
    """Run the program in this process, which ends with its exit code."""
    if job.hours_ahead:
        _restart_ahead(job)
    job.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(job.folder)
    output = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    stopwatch = Stopwatch()
    stopwatch.attach()
    sys.argv = ["layerskip", *job.overrides]
    try:
        run("layerskip", searches.sweep.search)
    finally:
        write_json(job.times, dict(stopwatch.seconds))


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
    fields = {name: str(value) for name, value in vars(job).items() if isinstance(value, Path)}
    command = [sys.executable, "-m", __spec__.name, json.dumps(fields), *job.overrides]
    os.execve(sys.executable, command, os.environ | clock | {"PYTHONPATH": str(_ROOT)})


class Stopwatch:
    """Seconds of the main thread in the trials' loop, by kind of work. Inside a function of one kind, no other kind counts."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._busy = True  # outside the loop

    def attach(self) -> None:
        """Replace the functions that are timed by timed ones, in this process."""
        self._time(simulated_backend, "pause", DECODING)
        for name in ("infer_relative_search_space", "sample_relative", "sample_independent", "before_trial", "after_trial"):
            self._time(TPESampler, name, SAMPLING)
        self._time(Tracker, "record", TRACKING)
        self._time(LiveView, "refresh", PAGE)
        self._count(Objective, "__call__")
        self._time_loop(searches.sweep, "run_trials")

    def _time(self, owner: Any, name: str, kind: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._busy or threading.current_thread() is not threading.main_thread():
                return original(*arguments, **named)
            self._busy, start = True, monotonic()
            try:
                return original(*arguments, **named)
            finally:
                self.seconds[kind] += monotonic() - start
                self._busy = False

        setattr(owner, name, timed)

    def _count(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def counted(*arguments: Any) -> Any:
            self.seconds[TRIALS] += 1
            return original(*arguments)

        setattr(owner, name, counted)

    def _time_loop(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def timed(*arguments: Any, **named: Any) -> Any:
            self._busy, start = False, monotonic()
            try:
                return original(*arguments, **named)
            finally:
                self.seconds[SECONDS] += monotonic() - start
                self._busy = True

        setattr(owner, name, timed)


if __name__ == "__main__":
    places = {name: Path(value) for name, value in json.loads(sys.argv[1]).items()}
    work(Job(tuple(sys.argv[2:]), **places))

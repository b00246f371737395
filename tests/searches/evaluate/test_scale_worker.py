"""A worker of ``searches.evaluate.scale`` in this process: its stopwatch on planted seconds, its log, and its clock."""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import optuna
import pytest

import searches.sweep
from searches.app import process
from searches.app.checks import InputError
from searches.evaluate import scale_worker
from searches.evaluate.scale_worker import (
    COORDINATION,
    DECODING,
    PROCESSOR,
    REST,
    SAMPLING,
    SECONDS,
    STORAGE,
    TRIALS,
    Job,
    Stopwatch,
    clock_library,
    work,
)
from searches.study import opening
from searches.study.objective import Objective
from searches.study.study import StudySettings
from searches.workers.crew import Crew
from searches.workers.retrying_storage import RetryingStorage
from tests.searches.known import PROMPTS, SETTINGS, Known
from tests.searches.workers.members import NAME, SPACE, study_in

_OUTSIDE = scale_worker._OUTSIDE


@pytest.fixture(autouse=True)
def _replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores at the end what a worker replaces in its process."""
    monkeypatch.setattr(scale_worker, "_replace", monkeypatch.setattr)


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for a worker that writes to this process's outputs; these, the folder and the arguments are restored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    kept = [(number, os.dup(number)) for number in (1, 2)]
    yield tmp_path
    for number, copy in kept:
        os.dup2(copy, number)
        os.close(copy)


def test_seconds_belong_to_the_innermost_kind_of_work_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"clock": 0.0, "processor": 0.0}

    def spend(seconds: float) -> None:
        now["clock"] += seconds
        now["processor"] += seconds / 4

    def decode() -> None:
        spend(8.0)
        parts.store()  # of a trial that decodes: what it stores is not told apart

    def loop() -> str:
        spend(1.0)
        parts.decode()
        parts.store()
        thread = threading.Thread(target=parts.store)  # of another thread
        thread.start()
        thread.join()
        return "done"

    parts = SimpleNamespace(decode=decode, loop=loop, store=lambda: spend(2.0))
    monkeypatch.setattr(scale_worker, "monotonic", lambda: now["clock"])
    monkeypatch.setattr(scale_worker, "thread_time", lambda: now["processor"])
    stopwatch = Stopwatch()
    stopwatch._time(parts, "loop", REST, within=_OUTSIDE)
    stopwatch._time(parts, "decode", DECODING)
    stopwatch._time(parts, "store", STORAGE, within=REST)
    spend(100.0)
    parts.decode()  # before the loop
    assert parts.loop() == "done"
    parts.store()
    seconds = {REST: 1.0 + 2.0, DECODING: 8.0 + 2.0, STORAGE: 2.0}
    times = stopwatch.times()
    assert times == {TRIALS: 0, SECONDS: seconds, PROCESSOR: {kind: each / 4 for kind, each in seconds.items()}}


def test_the_trials_of_a_study_are_counted_and_their_parts_timed() -> None:
    stopwatch, finished = Stopwatch(), list[int]()
    stopwatch.attach()
    storage = RetryingStorage(optuna.storages.InMemoryStorage())
    with Crew(storage, NAME, beat_seconds=60) as crew:
        study = study_in(storage)
        study.sampler = optuna.samplers.TPESampler(seed=0)
        objective = Objective(Known({}), SPACE, PROMPTS, SETTINGS, seed=0)
        settings = StudySettings(n_trials=3, remeasure=100)
        searches.sweep.run_trials(study, objective, settings, lambda trial: finished.append(trial.number), crew=crew)
    times = stopwatch.times()
    assert times[TRIALS] == len(finished) == 3
    assert times[SECONDS].keys() == times[PROCESSOR].keys() == {REST, SAMPLING, STORAGE, COORDINATION}
    assert min(times[SECONDS].values()) > 0


def _job(folder: Path, *overrides: str, hours_ahead: float = 0.0) -> Job:
    return Job(overrides, str(folder / "own"), str(folder / "log"), str(folder / "times"), "moon", 0.5, hours_ahead)


def test_a_worker_leaves_its_log_and_times_and_ends_with_the_code_of_the_program(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = time.sleep
    job = _job(outputs, "study.n_trials=0", "target.device=cpu", hours_ahead=2.0)
    with open(2, "w", buffering=1, closefd=False) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)  # instead of what a test runner has put there
        with pytest.raises(SystemExit) as end:
            work(job, is_ahead=True)
    assert end.value.code == 2
    assert (outputs / "log").read_text(encoding="utf-8").startswith("error: study.n_trials: ")
    assert json.loads((outputs / "times").read_text(encoding="utf-8")) == {TRIALS: 0, SECONDS: {}, PROCESSOR: {}}
    assert Path.cwd() == outputs / "own"
    assert process.this_process()["machine"] == "moon"
    assert isinstance(opening.Crew, functools.partial) and opening.Crew.keywords == {"beat_seconds": 0.5}
    assert time.sleep is not sleep and time.sleep(0.001) == ([], [], [])  # type: ignore[func-returns-value]


def test_a_worker_whose_clock_is_ahead_starts_anew_under_that_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[list[str], dict[str, str]]] = []

    def replace(path: str, command: list[str], environment: dict[str, str]) -> NoReturn:
        found.append((command, environment))
        raise SystemExit

    monkeypatch.setattr(os, "execve", replace)
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/there/faketime/libfaketimeMT.so.1")]))
    job = _job(tmp_path, "a=1", "b=[2,3]", hours_ahead=1.5)
    with pytest.raises(SystemExit):
        work(job)
    ((command, environment),) = found
    assert command[:3] == [sys.executable, "-m", "searches.evaluate.scale_worker"]
    assert json.loads(command[3]) == asdict(job) | {"overrides": ["a=1", "b=[2,3]"]}
    assert (environment["LD_PRELOAD"], environment["FAKETIME"]) == ("/there/faketime/libfaketimeMT.so.1", "+1.5h")
    assert not (tmp_path / "own").exists()


def test_a_clock_that_is_ahead_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: iter([]))
    with pytest.raises(InputError, match=r"^scenarios\.hours_ahead: libfaketime is missing"):
        clock_library()

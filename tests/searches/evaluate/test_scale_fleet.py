"""A fleet with planted ends: it replaces workers, brings about each fault, and counts what happened."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from searches.evaluate import scale_fleet
from searches.evaluate.scale_fleet import FINISHED, Fleet
from searches.evaluate.scale_scenario import Scenario
from searches.evaluate.scale_services import CRASH, FAST
from searches.evaluate.scale_worker import Job
from tests.searches.programs import FORKS

_ERROR = "error: outputs: cannot write runs.db: No space left on device"
_SMALL: dict[str, Any] = {"workers": 3, "n_trials": 12, "trial_seconds": 0.01}


@pytest.fixture(scope="module", autouse=True)
def _forkserver() -> None:
    """Start the tests' server of processes, which has imported everything, before a fleet would start one of its own."""
    process = FORKS.Process(target=os.getpid)
    process.start()
    process.join()


class Planted:
    """A database of which one more trial has finished at each look; one is lost later, and after all, workers end."""

    def __init__(self, done: Path, trials: int) -> None:
        self._done, self._trials, self._looks = done, trials, 0
        self.restarts: list[tuple[str, float]] = []

    def finished(self, study: str) -> frozenset[int] | None:
        assert study == "it"
        self._looks += 1
        if self._looks == 3:
            return None  # away
        if self._looks > self._trials + 1:
            self._done.touch()
        lost = {4} if self._looks > 8 else set()
        return frozenset(range(min(self._looks, self._trials))) - lost

    def restart(self, mode: str, seconds: float) -> None:
        self.restarts.append((mode, seconds))


class Server:
    """A server that writes down how long it is away."""

    def __init__(self) -> None:
        self.away: list[float] = []

    def restart(self, seconds: float) -> None:
        self.away.append(seconds)


def until_done(job: Job) -> None:
    """Wait for the end of the study, or for a full disk."""
    folder = Path(job.log).parent
    while True:
        if (Path(job.folder) / "full").exists():
            Path(job.log).write_text(f"a line\n{_ERROR}\n", encoding="utf-8")
            sys.exit(2)
        if (folder / "done").exists():
            return
        time.sleep(0.01)


def fail_after_a_trial(job: Job) -> None:
    """Finish a trial, and end without a word."""
    Path(job.log).with_suffix(".finished").touch()
    sys.exit(1)


class OfWorkers:
    """A database of which a trial has finished for each worker that says so."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def finished(self, study: str) -> frozenset[int]:
        return frozenset(range(len(list(self._folder.glob("*.finished")))))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fleet]:
    """Makes a fleet whose workers run a function."""

    def fleet(work: Callable[[Job], None], scenario: Scenario, **more: Any) -> Fleet:
        monkeypatch.setattr(scale_fleet, "work", work)
        monkeypatch.setattr(scale_fleet, "_POLL_SECONDS", 0.01)
        monkeypatch.setattr(scale_fleet, "fill", lambda disk: (disk / "full").touch())
        database = Planted(tmp_path / "done", scenario.n_trials)
        options = {"database": database, "server": None, "chance": random.Random(0)} | more
        return Fleet(scenario, "it", tmp_path, (), **options)

    return fleet


def test_every_fault_happens_and_every_end_is_counted(make: Callable[..., Fleet], tmp_path: Path) -> None:
    disk, server = tmp_path / "disk", Server()
    disk.mkdir()
    faults: dict[str, Any] = {"kills": 2, "restarts": 2, "database_gone": 0.25, "tracking_gone": 0.5, "full_disk": True}
    fleet = make(until_done, Scenario(**_SMALL, **faults), server=server, disk=disk)
    fleet.run()
    assert fleet.done == {"kills": 2, "restarts": 2, "database_gone": 1, "tracking_gone": 1, "full_disks": 1}
    restarts = fleet._database.restarts  # type: ignore[attr-defined]
    assert (FAST, 0.25) in restarts and sorted(mode for mode, _ in restarts) == [FAST, FAST, CRASH]
    assert server.away == [0.5]
    assert fleet.ends == {FINISHED: 2, f"2: {_ERROR}": 1}
    assert (fleet.finished, fleet.lost) == (frozenset(range(12)), {4})
    assert len(fleet.times) == 3 + 2  # of those that began, and of those that replaced killed ones


def test_workers_that_do_not_end_are_killed(make: Callable[..., Fleet]) -> None:
    never = Scenario(**_SMALL | {"n_trials": 10_000}, limit_seconds=0.1)
    with pytest.raises(RuntimeError, match=r"the workers of it did not end in 0\.1 s"):
        make(until_done, never).run()
    assert multiprocessing.active_children() == []


def test_a_worker_that_ends_too_early_is_replaced(make: Callable[..., Fleet], tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"worker-{number}.log").touch()
    fleet = make(fail_after_a_trial, Scenario(**_SMALL | {"workers": 1, "n_trials": 3}), database=OfWorkers(tmp_path))
    fleet.run()
    assert fleet.ends == {"1: no output": 3}
    assert len(fleet.times) == 3

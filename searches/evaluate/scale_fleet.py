"""A fleet of workers on one study, and the faults that it is put through at random moments."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from searches.evaluate.gpu_programs import quoted
from searches.evaluate.scale_scenario import Scenario
from searches.evaluate.scale_services import CRASH, FAST, Database, TrackingServer, fill
from searches.evaluate.scale_worker import Job, work

FINISHED = "finished"
_POLL_SECONDS = 0.1
_LONGEST_LINE = 200  # characters
_PAUSE_SECONDS = 3.0  # at most, between the end and the start of a restarted database
_PRELOADED = [
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "searches.evaluate.scale_worker",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.tracking.rest_store",
]


_Worker = tuple[BaseProcess, int, Path]
"""A process, its place, which its replacement takes, and its log."""


class Fleet:
    """Workers of one study in processes of their own; each that is killed is replaced.

    Args:
        scenario: the number of workers and the faults.
        name: of the study.
        folder: of everything that the workers write; every machine has a folder of its own in it.
        overrides: of the workers' program, without the folder of its outputs.
        database: holds the study.
        server: takes the runs; None without a server.
        chance: draws the moments of the faults and their victims.
        disk: folder that the first worker writes to, on a file system of its own; None without one.

    Attributes:
        finished: numbers of the trials that were ever seen finished.
        lost: numbers of those that were not finished any more at a later time.
        done: number of faults of each kind that happened.
        outputs: the folder of each machine.
        times: file of the seconds of each worker, which only those have that ended by themselves.
        ends: number of workers by how they ended, without those that were killed.
    """

    def __init__(
        self,
        scenario: Scenario,
        name: str,
        folder: Path,
        overrides: tuple[str, ...],
        database: Database,
        server: TrackingServer | None,
        chance: random.Random,
        disk: Path | None = None,
    ) -> None:
        self._scenario, self._name, self._folder, self._overrides = scenario, name, folder, overrides
        self._database, self._server, self._disk = database, server, disk
        self._random = chance
        # A child of a process that has imported everything begins within a fraction of a second.
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._workers: list[_Worker] = []
        self.outputs = [folder / f"machine-{number}" for number in range(scenario.machines)]
        self.times: list[Path] = []
        self._outages: list[threading.Thread] = []
        self.finished, self.lost = frozenset[int](), frozenset[int]()
        self.done, self.ends = Counter[str](), Counter[str]()

    def run(self) -> float:
        """Run the workers until all of them have ended, and return the seconds.

        Raises:
            RuntimeError: they did not end within the scenario's limit.
        """
        faults, start = self._faults(), time.monotonic()
        try:
            for place in range(self._scenario.workers):
                self._start(place)
            while self._workers:
                if time.monotonic() - start > self._scenario.limit_seconds:
                    raise RuntimeError(f"the workers of {self._name} did not end in {self._scenario.limit_seconds:g} s")
                ended = [worker for worker in self._workers if worker[0].exitcode is not None]
                self._observe()  # after that, as the last trial may have ended a worker
                while faults and len(self.finished) >= faults[0][0]:
                    faults.pop(0)[1]()
                self._replace(ended)
                time.sleep(_POLL_SECONDS)
            return time.monotonic() - start
        finally:
            for process, _, _ in self._workers:
                process.kill()
                process.join()
            for thread in self._outages:
                thread.join()

    def _observe(self) -> None:
        found = self._database.finished(self._name)
        if found is not None:
            self.lost |= self.finished - found
            self.finished |= found

    def _faults(self) -> list[tuple[float, Callable[[], None]]]:
        """Return the faults in order, each with the number of finished trials at which it happens."""
        scenario = self._scenario
        faults: list[tuple[float, Callable[[], None]]] = []
        # Some of the kills come before the first trial, as workers start.
        faults += [(self._moment(-0.05), self._kill) for _ in range(scenario.kills)]
        for number in range(scenario.restarts):
            mode, pause = (FAST, CRASH)[number % 2], self._random.uniform(0, _PAUSE_SECONDS)
            faults.append((self._moment(), self._outage("restarts", self._database.restart, mode, pause)))
        if scenario.database_gone:
            gone = self._outage("database_gone", self._database.restart, FAST, scenario.database_gone)
            faults.append((scenario.n_trials / 2, gone))
        if self._server is not None:
            gone = self._outage("tracking_gone", self._server.restart, scenario.tracking_gone)
            faults.append((scenario.n_trials / 3, gone))
        if self._disk is not None:
            disk = self._disk
            faults.append((1, lambda: self._fill(disk)))
        return sorted(faults, key=lambda fault: fault[0])

    def _moment(self, begin: float = 0.0) -> float:
        return self._random.uniform(begin, 0.98) * self._scenario.n_trials

    def _kill(self) -> None:
        worker = self._random.choice(self._workers)
        process, place, _ = worker
        time.sleep(self._random.uniform(0, self._scenario.trial_seconds / self._scenario.workers))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        self._workers.remove(worker)
        self.done["kills"] += 1
        self._start(place)

    def _outage(self, kind: str, change: Callable[..., None], *arguments: Any) -> Callable[[], None]:
        """Return a function that starts a change of a server in a thread, so that workers die during it, too."""

        def begin() -> None:
            self.done[kind] += 1
            thread = threading.Thread(target=change, args=arguments)
            self._outages.append(thread)
            thread.start()

        return begin

    def _fill(self, disk: Path) -> None:
        fill(disk)
        self.done["full_disks"] += 1

    def _start(self, place: int) -> None:
        """Start a worker at the place of an earlier one."""
        machine = place % self._scenario.machines
        own = self._disk if self._disk is not None and place == 0 else self.outputs[machine]
        log = self._folder / f"worker-{len(self.times)}.log"
        self.times.append(log.with_suffix(".json"))
        job = Job(
            (*self._overrides, f"outputs={quoted(str(own))}"),
            str(own),
            str(log),
            str(self.times[-1]),
            f"machine {machine}",
            self._scenario.beat_seconds,
            self._scenario.hours_ahead if place == 0 else 0.0,
        )
        process = self._context.Process(target=work, args=(job,))
        process.start()
        self._workers.append((process, place, log))

    def _replace(self, ended: Sequence[_Worker]) -> None:
        """Forget workers that have ended. While trials are missing, another one takes the place."""
        for worker in ended:
            process, place, log = worker
            process.join()
            self._workers.remove(worker)
            self.ends[_end(process.exitcode or 0, log)] += 1
            missing = len(self.finished) < self._scenario.n_trials
            if missing and not (self._disk is not None and place == 0):
                self._start(place)


def _end(code: int, log: Path) -> str:
    """Return ``finished`` for exit code 0, else the code and the last line of the worker's log."""
    if not code:
        return FINISHED
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return f"{code}: {lines[-1] if lines else 'no output'}"[:_LONGEST_LINE]

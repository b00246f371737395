"""The start of several workers on this machine, one for each GPU or share of the processor's cores.

A worker is the same command with ``worker=<number>``, which also runs on other machines. The supervisor shows their progress
together, and why a worker ended early. It measures nothing itself. If it is killed, Linux interrupts its workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import optuna
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

from searches.app.checks import InputError
from searches.app.interrupt import INTERRUPTED, interrupt_code
from searches.progress import Progress, say
from searches.study.leaderboard import leader_line, trial_line
from searches.study.machine import usable_cores
from searches.study.storage import JOINED, open_database, storage_url
from searches.study.study import StudySettings, finished

_POLL_SECONDS = 1.0
_TAIL = 20  # lines of the log of a worker that failed
_OWN = re.compile(r"\W*(study\.workers|worker)=")
_SET_PARENT_DEATH_SIGNAL = 1  # of linux/prctl.h
_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Place:
    """The part of the machine that a worker uses: variables of its environment, and processor cores, or all."""

    variables: dict[str, str]
    cores: tuple[int, ...] | None = None


def places(workers: int | str, device: str) -> list[Place]:
    """Return the places of workers: one visible GPU each, or an equal share of the cores on a machine without.

    ``auto`` is one worker per GPU, or one on a CPU. More workers than GPUs or cores are an :class:`InputError`.
    """
    gpus = [] if device == "cpu" else _visible_gpus()
    count = (len(gpus) or 1) if workers == "auto" else int(workers)
    cores = usable_cores()
    parts, name = (gpus, "visible GPUs") if gpus else (cores, "processor cores")
    if count > len(parts):
        raise InputError(f"study.workers: {count} is more than the {len(parts)} {name}, which workers must not share")
    if gpus:
        return [Place({"CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus[:count]]
    size = len(cores) // count
    shares = [tuple(cores[first * size : (first + 1) * size]) for first in range(count)]
    return [Place({"OMP_NUM_THREADS": str(size)}, share) for share in shares]


def supervise(config: DictConfig) -> None:
    """Start the workers of a study and wait for their end.

    Raises:
        KeyboardInterrupt: a signal. All workers have ended, and their trials are queued again.
        SystemExit: no worker has finished the study; with the exit code of the first that failed.
    """
    settings: StudySettings = instantiate(config.study)
    assert settings.workers is not None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found = places(settings.workers, str(config.target.get("device")))
    overrides = [each for each in HydraConfig.get().overrides.task if not _OWN.match(each)]
    workers = LocalWorkers(overrides, found, Path(config.outputs), settings)
    try:
        workers.watch()
    except BaseException as error:
        workers.stop(interrupt_code(error) - 128)
        raise
    codes = workers.codes()
    if 0 not in codes:
        raise SystemExit(next(code for code in codes if code))
    print((workers.folder / "report.md").read_text(encoding="utf-8") if workers.folder is not None else "", flush=True)


class LocalWorkers:
    """The processes of the workers. Their logs move into the folder of the study once a worker has joined it."""

    def __init__(self, overrides: Sequence[str], found: Sequence[Place], outputs: Path, settings: StudySettings) -> None:
        self._settings, self._outputs = settings, outputs
        self._logs = outputs / f"workers-{os.getpid()}"
        self._logs.mkdir(parents=True, exist_ok=True)
        self.folder: Path | None = None
        self._study: optuna.Study | None = None
        self._reported: set[int] = set()
        self._processes = [self._start(number, place, overrides) for number, place in enumerate(found)]

    def watch(self) -> None:
        """Show the progress of the study until all workers have ended."""
        shown, wanted = set[int](), self._settings.n_trials
        with Progress(self._settings.max_seconds) as progress, progress.counting(wanted, "trials") as count:
            progress.begin(f"{len(self._processes)} workers")
            while any(process.poll() is None for process in self._processes):
                time.sleep(_POLL_SECONDS)
                self._report_ended()
                if self._study is None:
                    self._find_study()
                    continue
                trials = finished(self._study)
                progress.leader = leader_line(self._study)
                for trial in (trial for trial in trials if trial.number not in shown):
                    shown.add(trial.number)
                    count()
                    progress.step(trial_line(trial))
        self._report_ended()
        if self._study is None:
            self._find_study()

    def stop(self, number: int = signal.SIGINT) -> None:
        """Send all workers the signal that interrupts them, and wait for their end; a further Ctrl-C kills them."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)
        try:
            for process in self._processes:
                process.wait()
        except KeyboardInterrupt:
            for process in self._processes:
                process.kill()
            raise

    def codes(self) -> list[int]:
        """Return the exit codes of the workers; a killed one has 128 and the number of its signal."""
        return [code if (code := process.wait()) >= 0 else 128 - code for process in self._processes]

    def _start(self, number: int, place: Place, overrides: Sequence[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "searches.layerskip", *overrides, f"worker={number}"]
        with (self._logs / f"{number}.log").open("wb") as log:
            return subprocess.Popen(
                command,
                env=os.environ | place.variables | {"PYTHONIOENCODING": "utf-8"},  # their lines are read here
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the supervisor, which interrupts each worker once
                preexec_fn=partial(_prepare_worker, place.cores, os.getpid()),
            )

    def _find_study(self) -> None:
        """Open the study of the first worker that has joined one, and move the logs into its folder."""
        joined = (line.partition(JOINED)[2].strip() for each in range(len(self._processes)) for line in self._log(each))
        name = next(filter(None, joined), None)
        if name is None:
            return
        if self.folder is None:
            self.folder = self._outputs / name
            logs = self.folder / "workers"
            logs.mkdir(parents=True, exist_ok=True)
            for log in self._logs.iterdir():
                log.rename(logs / log.name)
            self._logs.rmdir()
            self._logs = logs
        with contextlib.suppress(InputError):  # away for the moment, which ends no worker
            storage = open_database(storage_url(self._settings, self.folder))
            self._study = optuna.create_study(study_name=name, storage=storage, direction="maximize", load_if_exists=True)

    def _report_ended(self) -> None:
        """Print the last lines of workers that failed."""
        for number, process in enumerate(self._processes):
            if process.poll() not in (None, 0) and number not in self._reported:
                self._reported.add(number)
                for line in self._log(number)[-_TAIL:]:
                    say(f"worker {number}: {line}", sys.stderr)
                say(f"worker {number}: ended with exit code {process.poll()}", sys.stderr)

    def _log(self, number: int) -> list[str]:
        return (self._logs / f"{number}.log").read_text(encoding="utf-8", errors="replace").splitlines()


def _visible_gpus() -> list[str]:
    """Return the identifiers of the visible GPUs, as ``CUDA_VISIBLE_DEVICES`` names them."""
    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] if named else [str(number) for number in range(count)]


def _prepare_worker(cores: Sequence[int] | None, supervisor: int) -> None:
    """Prepare the process of a worker before its program starts: its cores, Ctrl-C, and the end of its supervisor."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a script's shell lets what it starts in the background ignore Ctrl-C
    if cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    if _LIBRARY is not None:
        _LIBRARY.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGINT, 0, 0, 0)
        if os.getppid() != supervisor:  # it was killed before
            os._exit(INTERRUPTED)

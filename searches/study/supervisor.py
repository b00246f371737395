"""The start of several workers on this machine, one for each GPU or share of the processor's cores.

A worker is the same command with ``worker=<number>``, which also runs on other machines. The first one prints, the others
write logs; why one of these ended early is printed, too. If the supervisor is killed, Linux interrupts its workers.
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

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

from searches.app.checks import InputError
from searches.app.interrupt import INTERRUPTED, interrupt_code
from searches.study.machine import usable_cores
from searches.study.study import StudySettings

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
    """Start the workers of a study and wait for them; exit with the first failure's code if none has succeeded."""
    settings: StudySettings = instantiate(config.study)
    assert settings.workers is not None
    found = places(settings.workers, str(config.target.get("device")))
    overrides = [each for each in HydraConfig.get().overrides.task if not _OWN.match(each)]
    workers = LocalWorkers(overrides, found, Path(config.outputs))
    try:
        codes = workers.wait()
    except BaseException as error:
        workers.stop(interrupt_code(error) - 128)
        raise
    if 0 not in codes:
        raise SystemExit(next(code for code in codes if code))


class LocalWorkers:
    """The processes of the workers, and the logs of all but the first, in ``workers`` of the outputs folder."""

    def __init__(self, overrides: Sequence[str], found: Sequence[Place], outputs: Path) -> None:
        folder = outputs / "workers"
        folder.mkdir(parents=True, exist_ok=True)
        self._logs = [folder / f"{os.getpid()}-{number}.log" for number in range(len(found))]
        self._processes = [self._start(number, place, overrides) for number, place in enumerate(found)]

    def wait(self) -> list[int]:
        """Wait until all workers have ended; return their exit codes. Of a killed one it is 128 and its signal's number."""
        running = dict(enumerate(self._processes))
        while running:
            time.sleep(_POLL_SECONDS)
            for number, process in list(running.items()):
                if (code := process.poll()) is not None:
                    del running[number]
                    if code:
                        self._report(number, code)
        return [code if (code := process.wait()) >= 0 else 128 - code for process in self._processes]

    def stop(self, number: int = signal.SIGINT) -> None:
        """Send all workers the signal that interrupts them, and wait for their end; a further Ctrl-C kills them."""
        for process in self._processes:
            process.send_signal(number)
        try:
            for process in self._processes:
                process.wait()
        except KeyboardInterrupt:
            for process in self._processes:
                process.kill()
            raise

    def _start(self, number: int, place: Place, overrides: Sequence[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "searches.layerskip", *overrides, f"worker={number}"]
        with self._logs[number].open("wb") if number else contextlib.nullcontext() as log:
            return subprocess.Popen(
                command,
                env=os.environ | place.variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if number else None,
                start_new_session=True,  # Ctrl-C reaches the supervisor, which interrupts each worker once
                preexec_fn=partial(_prepare_worker, place.cores, os.getpid()),
            )

    def _report(self, number: int, code: int) -> None:
        if number:
            for line in self._logs[number].read_text(errors="replace").splitlines()[-_TAIL:]:
                print(f"worker {number}: {line}", file=sys.stderr)
        print(f"worker {number}: ended with exit code {code}", file=sys.stderr, flush=True)


def _visible_gpus() -> list[str]:
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

"""Runs of the programs on tiny models, as new processes or as forks of a process that has imported everything."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import optuna
import torch
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from searches.predict import preparation
from tests.accelerator import DEVICE
from tests.resources import keep_imports

REPOSITORY = Path(__file__).parents[2]
QUICK = (
    "target=local",
    "target.dtype=float32",
    f"target.device={DEVICE}",
    "space.protect_first=0",
    "space.protect_last=0",
    "measure.max_new_tokens=8",
    "measure.prompts=2",
    "measure.held_out_prompts=2",
    "measure.held_out_repeats=1",
    "measure.finalists=2",
    "measure.drift=1000",  # a busy machine would be measured again and again
    "scan.proposals.scanned=4",
)
NO_PEERS = tuple(f"peers.transformers{which}=null" for which in ("", "_prompt_lookup", "_early_exit", "_assistant"))


def command(program: str, *overrides: str) -> list[str]:
    """Return the command line of a program."""
    return [sys.executable, "-m", f"searches.{program}", *overrides]


def environment() -> dict[str, str]:
    """Return the tests' environment, with the repository importable from anywhere and the same number of threads.

    Another number of threads would invalidate logged measurements.
    """
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": str(torch.get_num_threads())}


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["searches.layerskip", "searches.train", "mlflow.store.tracking.sqlalchemy_store"])


def execute(program: str, *overrides: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a program to its end in a process of its own."""
    return fork(f"searches.{program}", *overrides, cwd=cwd, timeout=timeout)


def fork(module: str, *arguments: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a module like ``python -m`` to its end; see :class:`Fork`."""
    with Fork(module, *arguments, cwd=cwd) as process:
        return process.wait(timeout)


class Fork:
    """A module that runs like ``python -m``, without the ten seconds that a new process takes for imports.

    Functions that are registered with ``atexit`` are not called. The end of the context kills the process.
    """

    def __init__(self, module: str, *arguments: str, cwd: Path) -> None:
        self._command = [module, *arguments]
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        for path in self._outputs:
            path.touch()
        options = module, arguments, cwd, self._outputs, environment(), torch.get_num_threads()
        self._process = FORKS.Process(target=_run, args=options)
        self._process.start()

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._folder.cleanup()

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Wait for the end of the process."""
        self._process.join(timeout)
        out, err = (path.read_text(encoding="utf-8") for path in self._outputs)
        if self.running:
            raise subprocess.TimeoutExpired(self._command, timeout, out, err)
        return subprocess.CompletedProcess(self._command, self._process.exitcode, out, err)

    def wait_for_trials(self) -> str:
        """Wait until a study's trials begin; return the line that announces them."""
        running = True
        while running:
            running = self.running
            for line in self._outputs[0].read_text(encoding="utf-8").splitlines(keepends=True):
                if line.startswith("study ") and line.endswith("\n"):
                    return line
            time.sleep(0.02)
        raise AssertionError(f"the study ended with {self._process.exitcode} before its trials began")


def _run(
    module: str, arguments: Sequence[str], cwd: Path, outputs: Sequence[Path], variables: Mapping[str, str], threads: int
) -> None:
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    keep_imports()  # a collection would write to their pages, which copies them
    os.environ |= variables
    os.chdir(cwd)
    torch.set_num_threads(threads)
    preparation.PROFILE_REPEATS = 2
    sys.argv = [module, *arguments]
    run_as_main(module)


def run_as_main(module: str) -> None:
    """Run a module, or a file that ends with ``.py``, as a program, although it may be imported already."""
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
        runpy.run_module(module, run_name="__main__")


def kill_study(*overrides: str, cwd: Path, seconds: float) -> bool:
    """Start a study, kill its program some seconds after its trials have begun, and return False if it ended before that."""
    with Fork("searches.layerskip", *overrides, cwd=cwd) as process:
        process.wait_for_trials()
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            process.send(signal.SIGKILL)
        return process.wait().returncode == -signal.SIGKILL


def quick(model: Path, outputs: Path, *more: str) -> Sequence[str]:
    """Return the overrides of a study that takes seconds."""
    return (*QUICK, f"target.path={model}", f"outputs={outputs}", *more)


def tracked(outputs: Path) -> Path:
    """Put a copy of an empty tracking store into a folder; MLflow takes seconds to create one."""
    outputs.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_store(), outputs / "mlflow.db")
    return outputs


@cache
def _store() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="layerskip-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    MlflowClient(sqlite(folder)).search_experiments()
    return folder / "mlflow.db"


def stored_study(outputs: Path, name: str) -> optuna.Study:
    """Load a study from the database in its folder."""
    return optuna.load_study(study_name=name, storage=f"sqlite:///{outputs / name / 'study.db'}")


def runs(uri: str, role: str) -> list[Run]:
    """Read the MLflow runs of one role."""
    client = MlflowClient(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return list(client.search_runs(experiments, f"tags.role = '{role}'", max_results=1000))


def sqlite(outputs: Path) -> str:
    """Return the URI of a study's default tracking store."""
    return f"sqlite:///{outputs / 'mlflow.db'}"

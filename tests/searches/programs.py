"""Runs the programs on tiny models, as they are started by hand or in a fork of a process that has imported everything."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import optuna
import torch
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from tests.accelerator import DEVICE

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
    "measure.finalists=2",
)
NO_PEERS = tuple(f"peers.transformers{which}=null" for which in ("", "_prompt_lookup", "_early_exit", "_assistant"))


def command(program: str, *overrides: str) -> list[str]:
    """The command line of a program."""
    return [sys.executable, "-m", f"searches.{program}", *overrides]


def environment() -> dict[str, str]:
    """The tests' environment with the repository importable from anywhere, and as many threads: what was measured with more
    of them is measured anew."""
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": str(torch.get_num_threads())}


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["searches.layerskip", "searches.train", "mlflow.store.tracking.sqlalchemy_store"])


def execute(program: str, *overrides: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a program to its end in a process of its own."""
    return fork(f"searches.{program}", *overrides, cwd=cwd, timeout=timeout)


def fork(module: str, *arguments: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a module as ``python -m`` does, without the ten seconds that a process takes to import what programs need.

    What is registered to be done at exit is not done.
    """
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("stdout", "stderr")]
        told = module, arguments, cwd, said, environment(), torch.get_num_threads()
        process = _FORKS.Process(target=_run, args=told)
        process.start()
        try:
            process.join(timeout)
        finally:
            over = process.exitcode is None
            process.kill()
            process.join()
            out, err = (path.read_text(encoding="utf-8") if path.exists() else "" for path in said)
        if over:
            raise subprocess.TimeoutExpired([module, *arguments], timeout, out, err)
    return subprocess.CompletedProcess([module, *arguments], process.exitcode, out, err)


def _run(
    module: str, arguments: Sequence[str], cwd: Path, said: Sequence[Path], variables: Mapping[str, str], threads: int
) -> None:
    for number, path in enumerate(said, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ |= variables
    os.chdir(cwd)
    torch.set_num_threads(threads)
    sys.argv = [module, *arguments]
    run_as_main(module)


def run_as_main(module: str) -> None:
    """Run a module as a program, parts of which are imported already; its own run does not look at them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
        runpy.run_module(module, run_name="__main__")


def wait_for_trials(process: subprocess.Popen[str]) -> str:
    """Wait until a study's trials begin; the line that says so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("study "):
            return line
    raise AssertionError(f"the study ended with {process.wait()} before its trials began")


def quick(model: Path, outputs: Path, *more: str) -> Sequence[str]:
    """Overrides of a study that takes seconds."""
    return (*QUICK, f"target.path={model}", f"outputs={outputs}", *more)


def tracked(outputs: Path) -> Path:
    """A folder with an empty tracking store in it, which takes MLflow seconds to make."""
    outputs.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_store(), outputs / "mlflow.db")
    return outputs


@cache
def _store() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="layerskip-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    MlflowClient(sqlite(folder)).search_experiments()
    return folder / "mlflow.db"


def journal_study(outputs: Path, name: str) -> optuna.Study:
    """A study as another program reads it."""
    return optuna.load_study(
        study_name=name, storage=JournalStorage(JournalFileBackend(str(outputs / name / "journal.log")))
    )


def runs(uri: str, role: str) -> list[Run]:
    """The MLflow runs of one role, as another program reads them."""
    client = MlflowClient(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return list(client.search_runs(experiments, f"tags.role = '{role}'", max_results=1000))


def sqlite(outputs: Path) -> str:
    """The URI of a study's default tracking store."""
    return f"sqlite:///{outputs / 'mlflow.db'}"

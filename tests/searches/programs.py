"""Runs the programs on tiny models, in this process or as real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import optuna
import torch
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

REPOSITORY = Path(__file__).parents[2]
QUICK = (
    "target=local",
    "target.dtype=float32",
    "target.device=cpu",
    "space.protect_first=0",
    "space.protect_last=0",
    "measure.max_new_tokens=8",
    "measure.prompts=2",
    "measure.held_out_prompts=2",
    "measure.finalists=2",
)


def command(program: str, *overrides: str) -> list[str]:
    """The command line of a program."""
    return [sys.executable, "-m", f"searches.{program}", *overrides]


def environment() -> dict[str, str]:
    """The tests' environment with the repository importable from anywhere, and as many threads: what was measured with more
    of them is measured anew."""
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": str(torch.get_num_threads())}


def execute(program: str, *overrides: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a program to its end as a process of its own."""
    return subprocess.run(
        command(program, *overrides), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout
    )


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

"""The environment of a measurement compared with the machine and the installed packages."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path

import hydra
import mlflow
import optuna
import torch
import transformers

from layerskip import Target
from layerskip.models.environment import environment, git_commit


def test_the_machine_and_its_packages_are_described_in_plain_values(tiny_target: Target) -> None:
    result = json.loads(json.dumps(environment(tiny_target), allow_nan=False))
    assert (result["device"], result["threads"]) == ("cpu", torch.get_num_threads())
    assert result["device_name"].strip()
    assert platform.system() in result["platform"]
    packages = {"torch": torch, "transformers": transformers, "optuna": optuna, "mlflow": mlflow, "hydra-core": hydra}
    expected = {name: module.__version__ for name, module in packages.items()}
    assert result["versions"] == expected | {"python": platform.python_version()}


def test_the_commit_is_that_of_this_program_and_is_marked_if_its_code_was_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        author = ("-c", "user.name=one", "-c", "user.email=one@example.com")
        command = ["git", "-C", str(tmp_path), *author, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert git_commit(tmp_path) is None
    git("init")
    for name in ("layerskip", "searches", "conf"):
        (tmp_path / name / "models").mkdir(parents=True)
        (tmp_path / name / "models" / "environment.py").write_text("one")
    (tmp_path / "README.md").write_text("one")
    git("add", "README.md")
    git("commit", "-m", "another project")
    assert git_commit(tmp_path) is None
    git("add", ".")
    git("commit", "-m", "all")
    (tmp_path / "README.md").write_text("two")
    assert git_commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "searches" / "more.py").write_text("one")
    assert git_commit(tmp_path) == f"{git('rev-parse', 'HEAD')}-dirty"

"""What a measurement says about where it ran, against what the machine and the packages say themselves."""

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


def test_versions_are_those_that_are_imported(tiny_target: Target) -> None:
    modules = {
        "torch": torch,
        "transformers": transformers,
        "optuna": optuna,
        "mlflow": mlflow,
        "hydra-core": hydra,
    }
    expected = {name: module.__version__ for name, module in modules.items()}
    found = environment(tiny_target)["versions"]
    assert found == expected | {"python": platform.python_version()}


def test_the_machine_is_described_in_plain_values(tiny_target: Target) -> None:
    found = json.loads(json.dumps(environment(tiny_target), allow_nan=False))
    assert (found["device"], found["threads"]) == ("cpu", torch.get_num_threads())
    assert found["device_name"].strip()
    assert platform.system() in found["platform"]


def test_a_commit_is_told_with_what_is_not_its_own(tmp_path: Path) -> None:
    """Of this program's checkout, and by its code; not of a project that it is installed in."""

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=one", "-c", "user.email=one@example.com")
        done = subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert git_commit(tmp_path) is None
    git("init")
    for name in ("layerskip", "searches", "conf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "models").mkdir()
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


def test_threads_are_those_in_use(tiny_target: Target) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert environment(tiny_target)["threads"] == before + 1
    finally:
        torch.set_num_threads(before)

"""What a measurement says about where it ran, against what the machine and the packages say themselves."""

from __future__ import annotations

import json
import platform

import hydra
import mlflow
import optuna
import torch
import transformers

from layerskip import Target
from layerskip.environment import environment


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
    assert found["git_commit"] is None or len(found["git_commit"].removesuffix("-dirty")) == 40


def test_threads_are_those_in_use(tiny_target: Target) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert environment(tiny_target)["threads"] == before + 1
    finally:
        torch.set_num_threads(before)

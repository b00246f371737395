"""Targets that accelerate places: the same output and every tensor in its place; the environment of a measurement."""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import hydra
import mlflow
import optuna
import pytest
import torch
import transformers
from torch.utils import backend_registration

from layerskip import ConfigError, SpeculativeConfig, Target, generate, load_target
from layerskip.heads.readout import Readout
from layerskip.models.environment import environment, git_commit, machine
from tests.models.passes import LENGTH, METHODS, PROMPT, assert_every_method_gives, greedy
from tests.tiny import save_tiny

MODULES = ("embed_tokens", "rotary_emb", "layers.0", "layers.1", "layers.2", "norm")
ON_CPU = {f"model.{name}": "cpu" for name in MODULES} | {"lm_head": "cpu"}
OFFLOADED = {
    "a layer": ON_CPU | {"model.layers.1": "disk"},
    "both ends": ON_CPU | {"model.embed_tokens": "disk", "model.layers.2": "disk", "lm_head": "disk"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("placed")
    return {family: save_tiny(base / family, family, idle=[1]) for family in ("llama", "gemma3_text")}


@pytest.mark.parametrize(("family", "places"), [("llama", "a layer"), ("gemma3_text", "both ends")])
def test_offloaded_weights_give_the_same_tokens(folders: dict[str, Path], family: str, places: str) -> None:
    folder = str(folders[family])
    whole, target = (load_target(folder, dtype="float32", device=device) for device in ("cpu", OFFLOADED[places]))
    assert any(weight.is_meta for weight in target.model.parameters())
    expected = greedy(whole)
    assert_every_method_gives(expected, target)
    assert (target.device, target.dtype) == (torch.device("cpu"), "float32")
    assert (target.digest, target.weights_sample) == (whole.digest, whole.weights_sample)
    assert greedy(target) == expected  # the views left the model and its hooks as they were


@pytest.mark.parametrize("places", ["balanced", {"": "cpu"}])
def test_a_model_that_fits_is_loaded_as_without_a_map(
    tiny_target: Target, places: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    target = load_target(tiny_target.name, dtype="float32", device=places)
    assert (target.device.type, target.digest) == ("cpu", tiny_target.digest)
    assert generate(target, PROMPT, max_new_tokens=LENGTH).tokens == greedy(target)


def test_offloaded_weights_are_named_in_an_environment_and_refuse_heads(folders: dict[str, Path]) -> None:
    folder = str(folders["llama"])
    whole, target = (load_target(folder, dtype="float32", device=device) for device in ("cpu", OFFLOADED["both ends"]))
    assert machine(target)["device_name"] == f"{machine(whole)['device_name']} (cpu, disk)"
    with pytest.raises(ConfigError, match=r"^target\.device: heads need a target whose weights are all on one device$"):
        Readout(target, None)
    assert Readout(whole, None).weight is whole.model.get_output_embeddings().weight


def test_a_view_does_not_keep_a_placed_model(folders: dict[str, Path]) -> None:
    """Accelerate replaces methods of a placed model by functions that hold it."""
    target = load_target(str(folders["llama"]), dtype="float32", device=OFFLOADED["a layer"])
    generate(target, PROMPT, SpeculativeConfig.from_dict(METHODS["layer_skip"]), max_new_tokens=4)
    model = weakref.ref(target.model)
    del target
    gc.collect()
    assert model() is None


@pytest.mark.system
def test_every_pass_of_a_split_model_stays_on_its_devices() -> None:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no devices without a kernel")
    command, folder = [sys.executable, "-m", "tests.models.split_passes"], Path(__file__).parents[2]
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": "", "LAYERSKIP_TEST_DEVICE": "cpu"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]


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

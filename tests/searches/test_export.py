"""Tests of ``searches.export``: the table, the commands of an engine, written models and drafts, and refusals."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from layerskip import Export, SpeculativeConfig, Target, load_target
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.heads.folders import load_eagle
from layerskip.models.trained_module import save_trained
from tests.searches.conftest import Launch
from tests.tiny import save_tiny

LOOKUP = SpeculativeConfig("prompt_lookup", 5)
Exported = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = save_tiny(tmp_path_factory.mktemp("target"), num_hidden_layers=4)
    return load_target(str(folder), dtype="float32", device="cpu")


@pytest.fixture
def exported(target: Target, tmp_path: Path, launch: Launch) -> Exported:
    """Runs the program on an export of a configuration."""

    def program(config: SpeculativeConfig, *arguments: str) -> subprocess.CompletedProcess[str]:
        Export(target.describe(), config).save(tmp_path / "best.json")
        return launch("export", str(tmp_path / "best.json"), "target.device=cpu", *arguments, cwd=tmp_path)

    return program


def test_a_table_of_all_engines_is_printed(exported: Exported) -> None:
    done = exported(SpeculativeConfig("token_recycling", 3))
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:8]]
    assert [row[0] for row in rows] == [
        "| vllm", "| sglang", "| tensorrt_llm", "| llama_cpp", "| openvino_genai", "| transformers"
    ]  # fmt: skip
    assert [row[2] for row in rows] == [*["-"] * 5, "custom_generate"]
    assert "config.method: token_recycling" in rows[0][3]


def test_the_printed_commands_are_those_of_the_export(exported: Exported, tmp_path: Path) -> None:
    """A shell splits them into the words that best.json has, and reads the call of a library."""
    config = SpeculativeConfig("layer_skip", 3, mask="layers:1-2")
    for engine in ("vllm", "sglang", "llama_cpp"):
        printed = exported(config, f"engine={engine}").stdout
        stored = json.loads((tmp_path / "best.json").read_text())["engines"][engine]
        lines = [line for line in printed.splitlines() if not line.startswith("#")]
        assert [shlex.split(line) for line in lines] == [*stored["prepare"], stored["command"]]
        assert "# differs: config.mask" in printed
    for engine in ("tensorrt_llm", "openvino_genai", "transformers"):
        printed = exported(LOOKUP, f"engine={engine}").stdout
        done = subprocess.run(["bash", "-n"], input=printed, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr, printed.rstrip().endswith("END")) == (0, "", True)


@torch.inference_mode()
def test_kept_layers_are_written_as_a_model(target: Target, tmp_path: Path, exported: Exported) -> None:
    config = SpeculativeConfig("layer_skip", 3, mask="layers:1-2")
    done = exported(config, "draft=draft", "model=model")
    assert done.returncode == 0, done.stderr
    draft, model = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("draft", "model"))
    assert draft.config.num_hidden_layers == 2
    layers = target.model.model.layers
    assert torch.equal(draft.model.layers[1].mlp.up_proj.weight, layers[3].mlp.up_proj.weight)
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens).logits, target.model(tokens).logits)
    assert (tmp_path / "model" / "tokenizer.json").exists()


@torch.inference_mode()
def test_draft_models_and_heads_are_written_as_engines_load_them(target: Target, tmp_path: Path, exported: Exported) -> None:
    small = load_target(str(save_tiny(tmp_path / "small", num_hidden_layers=1)), dtype="float32", device="cpu")
    done = exported(SpeculativeConfig("draft_model", 3, draft_model=small.name), "draft=draft")
    assert done.returncode == 0, done.stderr
    tokens = torch.arange(8)[None]
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert torch.equal(draft(tokens).logits, small.model(tokens).logits)
    head = EagleHead(EagleShape.of(target, lookback=0))
    save_trained(tmp_path / "head", head.shape.to_dict(), head.weights(), target, {})
    config = SpeculativeConfig("eagle", 3, head=str(tmp_path / "head"), top_k=1)
    done = exported(config, "draft=published", "engine=vllm")
    assert done.returncode == 0, done.stderr
    assert torch.equal(load_eagle(tmp_path / "published", target).fc.weight, head.fc.weight)


REFUSED = [
    (LOOKUP, ["engine=tgi"], "engine: 'tgi' is not one of vllm, "),
    (SpeculativeConfig("lookahead", 3), ["engine=vllm"], "engine: vllm cannot run this export: config.method: lookahead: "),
    (LOOKUP, ["draft=draft"], "draft: prompt lookup (1-3-gram, last match; length 5) has no draft"),
    (LOOKUP, ["model=."], "model: . is not empty"),
]


@pytest.mark.parametrize(("config", "arguments", "message"), REFUSED)
def test_bad_input_ends_with_one_line_and_exit_code_2(
    config: SpeculativeConfig, arguments: list[str], message: str, exported: Exported
) -> None:
    done = exported(config, *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {message}")


def test_a_missing_file_is_refused(tmp_path: Path, launch: Launch) -> None:
    for arguments, message in (([], "export: is missing"), (["absent.json"], "export: cannot read absent.json")):
        done = launch("export", *arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr.startswith(f"error: {message}")) == (2, True)

"""Tests of ``searches.export``: the table, the commands of an engine, written models and drafts, and refusals."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from layerskip import Export, SpeculativeConfig, Target, load_target
from searches.app.application import run
from searches.app.exported import command_line
from searches.exporting.program import export, script
from tests.tiny import save_tiny

LOOKUP = SpeculativeConfig("prompt_lookup", 5)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = save_tiny(tmp_path_factory.mktemp("target"), num_hidden_layers=4)
    return load_target(str(folder), dtype="float32", device="cpu")


def _run(
    target: Target, folder: Path, config: SpeculativeConfig, monkeypatch: pytest.MonkeyPatch, *arguments: str, **changes: Any
) -> int:
    """Run the program on an export of a configuration; return its exit code."""
    file = folder / "best.json"
    Export(Export.describe(target) | changes, config).save(file)
    monkeypatch.setattr(sys, "argv", ["export", *command_line([str(file), "target.device=cpu", *arguments])])
    with pytest.raises(SystemExit) as ended:
        run("export", export, resumable=False)
    return int(ended.value.code or 0)


def test_a_table_of_all_engines_is_printed(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(target, tmp_path, SpeculativeConfig("token_recycling", 3), monkeypatch) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:8]]
    assert [row[0] for row in rows] == [
        "| vllm", "| sglang", "| tensorrt_llm", "| llama_cpp", "| openvino_genai", "| transformers"
    ]  # fmt: skip
    assert [row[2] for row in rows] == [*["-"] * 5, "custom_generate"]
    assert "config.kind: token_recycling" in rows[0][3]


def test_the_printed_commands_are_those_of_the_export(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell splits them into the words that best.json has."""
    config = SpeculativeConfig("layer_skip", 3, mask="layers:1-2")
    for engine in ("vllm", "sglang", "llama_cpp"):
        assert _run(target, tmp_path, config, monkeypatch, f"engine={engine}") == 0
        printed = capsys.readouterr().out
        stored = json.loads((tmp_path / "best.json").read_text())["engines"][engine]
        lines = [line for line in printed.splitlines() if not line.startswith("#")]
        assert [shlex.split(line) for line in lines] == [*stored["prepare"], stored["command"]]
        assert "# differs: config.mask" in printed


def test_the_call_of_a_library_runs_in_a_shell(target: Target, tmp_path: Path) -> None:
    Export(Export.describe(target), LOOKUP).save(tmp_path / "best.json")
    engines = Export.load(tmp_path / "best.json").engines(tmp_path / "best.json")
    for name in ("tensorrt_llm", "openvino_genai", "transformers"):
        text = script(name, engines[name])
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert text.rstrip().endswith("END")


@torch.inference_mode()
def test_kept_layers_are_written_as_a_model(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SpeculativeConfig("layer_skip", 3, mask="layers:1-2")
    assert _run(target, tmp_path, config, monkeypatch, f"draft={tmp_path / 'draft'}", f"model={tmp_path / 'model'}") == 0
    draft, model = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("draft", "model"))
    assert draft.config.num_hidden_layers == 2
    layers = target.model.model.layers
    assert torch.equal(draft.model.layers[1].mlp.up_proj.weight, layers[3].mlp.up_proj.weight)
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens).logits, target.model(tokens).logits)
    assert (tmp_path / "model" / "tokenizer.json").exists()


REFUSED = [
    (LOOKUP, ["engine=tgi"], "engine: 'tgi' is not one of vllm, "),
    (SpeculativeConfig("lookahead", 3), ["engine=vllm"], "engine: vllm cannot run this export: config.kind: lookahead: "),
    (LOOKUP, ["draft=DRAFT"], "draft: prompt lookup (1-3-gram, last match; length 5) has no draft"),
    (LOOKUP, ["model=."], "model: . is not empty"),
]


@pytest.mark.parametrize(("config", "arguments", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_bad_input_ends_with_one_line_and_exit_code_2(
    target: Target,
    config: SpeculativeConfig,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [word.replace("DRAFT", str(tmp_path / "draft")) for word in arguments]
    assert _run(target, tmp_path, config, monkeypatch, *given) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


def test_a_missing_file_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (([], "export: is missing"), (["absent.json"], "export: cannot read absent.json")):
        monkeypatch.setattr(sys, "argv", ["export", *command_line(arguments)])
        with pytest.raises(SystemExit) as ended:
            run("export", export, resumable=False)
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith(f"error: {message}")

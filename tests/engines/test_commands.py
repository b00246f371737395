"""Commands and calls of engines: how they parse, what they carry, and why an engine cannot run a configuration."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerskip import Sampling, SpeculativeConfig
from layerskip.engines.registry import ENGINES, describe_engines
from tests.engines.known import CONFIGS, KEPT, LOOKUP, MODEL, deployment, interpreter

CASES = [(engine, name) for engine in ENGINES for name in CONFIGS]
RUNNABLE = {
    "vllm": {"none", "lookup", "last lookup", "model", "stopping model", "other tokenizer", "kept layers", "retrieval"},
    "sglang": {"none", "lookup", "last lookup", "model", "stopping model", "kept layers"},
    "tensorrt_llm": {"none", "lookup", "last lookup", "model", "stopping model", "kept layers"},
    "llama_cpp": {"none", "lookup", "last lookup", "model", "stopping model", "kept layers", "lookup then model"},
    "openvino_genai": {"none", "lookup", "last lookup", "model", "stopping model", "kept layers"},
    "transformers": set(CONFIGS),
}
NUCLEUS = Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.1)


def _entry(engine: str, config: SpeculativeConfig, **changes: Any) -> dict[str, Any]:
    return describe_engines(deployment(config, **changes))[engine]


def _option(command: list[str], name: str) -> str:
    assert command.count(name) == 1
    return command[command.index(name) + 1]


@pytest.mark.parametrize(("engine", "name"), CASES)
def test_each_engine_has_a_command_or_a_reason(engine: str, name: str) -> None:
    entry = _entry(engine, CONFIGS[name])
    assert entry["version"]
    assert json.loads(json.dumps(entry)) == entry
    assert len({"command", "call", "reason"} & set(entry)) == 1
    assert ("reason" not in entry) == (name in RUNNABLE[engine])
    if "reason" in entry:
        assert re.match(r"config\.\w+: .+[^.]$", entry["reason"])
        assert "\n" not in entry["reason"]
    for words in (*entry.get("prepare", ()), entry.get("command", [])):
        assert all(isinstance(word, str) and word for word in words)


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "transformers"])
def test_weights_that_were_quantised_on_loading_are_refused(engine: str) -> None:
    assert _entry(engine, LOOKUP, quantization="torchao-int8")["reason"].startswith("target.quantization: ")


def test_vllm_takes_the_range_of_n_grams() -> None:
    command = _entry("vllm", LOOKUP)["command"]
    assert command[:3] == ["vllm", "serve", "Org/Model"]
    assert (_option(command, "--revision"), _option(command, "--dtype")) == ("abc", "float32")
    expected = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    assert json.loads(_option(command, "--speculative-config")) == expected
    assert not any(note.startswith("config.match") for note in _entry("vllm", LOOKUP)["differs"])
    assert any(note.startswith("config.match") for note in _entry("vllm", CONFIGS["last lookup"])["differs"])


def test_an_export_of_a_cpu_starts_the_server_that_its_wheel_has() -> None:
    measured = {"device": "cpu", "backend": {"name": "vllm", "args": ["--max-model-len", "2048"]}}
    command = describe_engines(replace(deployment(LOOKUP), environment=measured))["vllm"]["command"]
    assert command[:5] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "Org/Model"]
    assert _option(command, "--max-model-len") == "2048"
    assert _option(command, "--speculative-config") == _option(_entry("vllm", LOOKUP)["command"], "--speculative-config")
    measured = {"device": "cuda", "backend": {"name": "server", "args": ["--max-model-len", "2048"]}}
    assert describe_engines(replace(deployment(LOOKUP), environment=measured))["vllm"] == _entry("vllm", LOOKUP)


def test_retrieval_is_vllms_suffix_decoding() -> None:
    config = SpeculativeConfig("retrieval", 6, prompt_lookup_min=1, prompt_lookup_max=4, tree_tokens=8, min_token_prob=0.1)
    assert _entry("vllm", config)["arguments"] == {
        "method": "suffix",
        "num_speculative_tokens": 6,
        "suffix_decoding_max_tree_depth": 10,
        "suffix_decoding_max_spec_factor": 2.0,
        "suffix_decoding_min_token_prob": 0.1,
    }
    stored = SpeculativeConfig("retrieval", 6, datastore="store")
    assert _entry("vllm", stored)["reason"].startswith("config.method: retrieval: no engine drafts from a datastore")


def test_a_published_head_of_eagle_3_is_for_the_engines_that_load_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    (tmp_path / "model.safetensors").touch()
    engines = describe_engines(deployment(SpeculativeConfig("eagle", 3, head=str(tmp_path), top_k=1)))
    methods = {name: entry.get("method") for name, entry in engines.items()}
    assert methods == {
        "vllm": "eagle3",
        "sglang": "EAGLE3",
        "tensorrt_llm": "Eagle3DecodingConfig",
        "llama_cpp": None,
        "openvino_genai": None,
        "transformers": "custom_generate",
    }


def test_kept_layers_are_written_before_they_are_served() -> None:
    entry = _entry("vllm", KEPT, file="outputs/mine/best.json")
    assert entry["prepare"] == [
        ["python", "-m", "searches.export", "outputs/mine/best.json", "draft=outputs/mine/best.draft"]
    ]
    assert entry["arguments"] == {"method": "draft_model", "num_speculative_tokens": 3, "model": "outputs/mine/best.draft"}
    assert {note.partition(":")[0] for note in entry["differs"]} == {"config.mask", "config.stop"}


@pytest.mark.parametrize("name", ["smollm2", "model.gguf"])
def test_a_target_that_is_no_folder_is_written_before_it_is_served(name: str) -> None:
    entry = _entry("vllm", LOOKUP, name=name, revision=None)
    assert entry["prepare"] == [["python", "-m", "searches.export", "best.json", "model=best.model"]]
    assert entry["command"][2] == "best.model"


def test_sglang_counts_the_last_token_of_the_text() -> None:
    command = _entry("sglang", MODEL)["command"]
    assert _option(command, "--speculative-algorithm") == "STANDALONE"
    assert _option(command, "--speculative-draft-model-path") == "Org/Draft"
    assert _option(command, "--speculative-num-steps") == "3"
    assert _option(command, "--speculative-num-draft-tokens") == "4"
    assert _option(command, "--speculative-eagle-topk") == "1"


def test_llama_cpp_puts_a_lookup_before_a_draft_model() -> None:
    entry = _entry("llama_cpp", CONFIGS["lookup then model"])
    assert _option(entry["command"], "--spec-type") == "ngram-simple,draft-simple"
    assert _option(entry["command"], "--spec-ngram-simple-size-n") == "4"
    assert _option(entry["command"], "--spec-ngram-simple-size-m") == "7"
    assert _option(entry["command"], "--spec-draft-n-max") == "3"
    made = [_option(words, "--outfile") for words in entry["prepare"] if "convert_hf_to_gguf.py" in words]
    assert made == [_option(entry["command"], "--model"), _option(entry["command"], "--spec-draft-model")]
    assert _option(_entry("llama_cpp", CONFIGS["stopping model"])["command"], "--spec-draft-p-min") == "0.4"


@pytest.mark.parametrize("engine", ["tensorrt_llm", "openvino_genai", "transformers"])
@pytest.mark.parametrize("name", sorted(RUNNABLE["openvino_genai"]))
def test_a_call_is_python_with_the_values_that_it_states(engine: str, name: str) -> None:
    entry = _entry(engine, CONFIGS[name], sampling=NUCLEUS)
    tree = ast.parse(entry["call"])
    given = {
        word.arg: word.value.value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        for word in call.keywords
        if isinstance(word.value, ast.Constant)
    }
    given |= {
        node.targets[0].attr: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and isinstance(node.value, ast.Constant)
    }
    stated = entry.get("arguments", {}) | entry["request"]
    assert {key: given.get(key) for key in stated} == stated
    assert (stated["temperature"], stated["top_p"]) == (0.7, 0.9)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama_cpp"])
def test_each_request_has_the_sampling_of_the_measurement(engine: str) -> None:
    request = _entry(engine, LOOKUP, sampling=NUCLEUS)["request"]
    penalty = request.pop("repeat_penalty" if engine == "llama_cpp" else "repetition_penalty")
    stated = [request[name] for name in ("temperature", "top_k", "top_p", "min_p")]
    assert [*stated, penalty] == [0.7, 20, 0.9, 0.05, 1.1]
    assert _entry(engine, LOOKUP)["request"]["temperature"] == 0.0


_PARSE_VLLM = """
import dataclasses, json, sys
from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
known = {field.name for field in dataclasses.fields(SpeculativeConfig)}
parsed = []
for words in json.load(sys.stdin):
    given = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--model", words[2], *words[3:]])
    parsed.append([given.model, given.dtype, given.revision, sorted(set(given.speculative_config or {}) - known)])
print("parsed", json.dumps(parsed))
"""


@pytest.mark.slow
def test_vllm_itself_parses_its_commands() -> None:
    python = interpreter("vllm")
    commands = [_entry("vllm", CONFIGS[name])["command"] for name in sorted(RUNNABLE["vllm"])]
    done = subprocess.run(
        [python, "-c", _PARSE_VLLM], input=json.dumps(commands), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("parsed "))
    assert json.loads(line.removeprefix("parsed ")) == [["Org/Model", "float32", "abc", []]] * len(commands)


_CHECK_OPENVINO = """
import json, sys, openvino_genai
for fields in json.load(sys.stdin):
    openvino_genai.GenerationConfig(max_new_tokens=8, **fields).validate()
print("valid")
"""


@pytest.mark.slow
def test_openvino_genai_itself_accepts_its_arguments() -> None:
    python = interpreter("openvino_genai")
    entries = [
        _entry("openvino_genai", CONFIGS[name], sampling=sampling)
        for name in sorted(RUNNABLE["openvino_genai"])
        for sampling in (Sampling(), NUCLEUS)
    ]
    fields = [entry.get("arguments", {}) | entry["request"] for entry in entries]
    done = subprocess.run(
        [python, "-c", _CHECK_OPENVINO], input=json.dumps(fields), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout.strip() == "valid", done.stderr[-2000:]

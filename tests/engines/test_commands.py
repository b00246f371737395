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

from layerskip import Export, Sampling, SpeculativeConfig, Target
from layerskip.engines.registry import ENGINES, describe_engines
from tests.engines.known import CONFIGS, KEPT, LOOKUP, deployment, interpreter

RUNNABLE = {
    "vllm": {
        "none", "lookup", "last lookup", "model", "stopping model", "other tokenizer", "kept layers", "retrieval",
    },
    "sglang": {"none", "lookup", "last lookup", "model", "stopping model", "kept layers"},
    "tensorrt_llm": {"none", "lookup", "last lookup", "model", "stopping model", "kept layers"},
    "llama_cpp": {
        "none", "lookup", "last lookup", "model", "stopping model", "kept layers", "lookup then model", "bits",
        "lookup then bits",
    },
    "openvino_genai": {"none", "lookup", "last lookup", "model", "stopping model", "kept layers", "bits"},
    "transformers": set(CONFIGS),
}  # fmt: skip
NUCLEUS = Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.1)


def _entry(engine: str, config: SpeculativeConfig, **changes: Any) -> dict[str, Any]:
    return describe_engines(deployment(config, **changes))[engine]


def _option(command: list[str], name: str) -> str:
    assert command.count(name) == 1
    return command[command.index(name) + 1]


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_has_a_command_or_a_reason(engine: str) -> None:
    entries = {name: _entry(engine, config) for name, config in CONFIGS.items()}
    assert {name for name, entry in entries.items() if "reason" not in entry} == RUNNABLE[engine]
    for entry in entries.values():
        assert entry["version"]
        assert json.loads(json.dumps(entry)) == entry
        assert len({"command", "call", "reason"} & set(entry)) == 1
        assert re.fullmatch(r"config\.\w+: .+[^.]", entry.get("reason", "config.method: none"))
        for words in (*entry.get("prepare", ()), entry.get("command", [])):
            assert all(isinstance(word, str) and word for word in words)


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "transformers"])
def test_weights_that_were_quantised_on_loading_are_refused(engine: str) -> None:
    assert _entry(engine, LOOKUP, quantization="torchao-int8")["reason"].startswith("target.quantization: ")


def test_a_command_has_the_values_of_the_configuration() -> None:
    for engine, name, options in (
        ("vllm", "lookup", {"--revision": "abc", "--dtype": "float32"}),
        # SGLang counts the last token of the text, too.
        ("sglang", "model", {"--speculative-num-steps": "3", "--speculative-num-draft-tokens": "4"}),
        ("llama_cpp", "lookup then model", {"--spec-type": "ngram-simple,draft-simple", "--spec-draft-n-max": "3"}),
        ("llama_cpp", "stopping model", {"--spec-draft-p-min": "0.4"}),
    ):
        command = _entry(engine, CONFIGS[name])["command"]
        assert {option: _option(command, option) for option in options} == options


def test_a_self_draft_of_fewer_bits_is_prepared_at_these_bits() -> None:
    config = CONFIGS["bits"]
    assert _entry("vllm", config, dtype="bfloat16")["prepare"] == [_EXPORTED]
    on_cpu = replace(deployment(config), environment={"device": "cpu"})
    assert describe_engines(on_cpu)["vllm"]["prepare"] == [_EXPORTED]  # it has kernels of 8 bits in float32
    for engine, name, words in (
        ("llama_cpp", "bits", ["llama-quantize", "best.draft.gguf", "best.draft-int8.gguf", "Q8_0"]),
        ("llama_cpp", "lookup then bits", ["llama-quantize", "best.draft.gguf", "best.draft-int4.gguf", "Q4_0"]),
    ):
        entry = _entry(engine, CONFIGS[name])
        assert entry["prepare"][-1] == words
        assert _option(entry["command"], "--spec-draft-model") == words[2]
    converted = _entry("openvino_genai", config)["prepare"][-1]
    assert (_option(converted, "--weight-format"), converted[-1]) == ("int8", "best.draft-openvino")
    notes = {
        engine: " ".join(_entry(engine, config, dtype="bfloat16")["differs"]) for engine in ("vllm", "sglang", "llama_cpp")
    }
    assert {engine: "as it is stored" in note for engine, note in notes.items()} == {
        "vllm": True, "sglang": True, "llama_cpp": False
    }  # fmt: skip
    for engine in ("vllm", "sglang"):
        assert "8 bits in bfloat16" in _entry(engine, config)["reason"]
        assert "4 bits in bfloat16" in _entry(engine, CONFIGS["two formats"])["reason"]
        assert "command" in _entry(engine, CONFIGS["two formats"], dtype="bfloat16")
    assert "config.weights: OpenVINO reads" in _entry("openvino_genai", CONFIGS["two formats"])["reason"]


_EXPORTED = ["python", "-m", "searches.export", "best.json", "draft=best.draft", "engine=vllm"]
RETRIEVAL = SpeculativeConfig("retrieval", 6, prompt_lookup_min=1, prompt_lookup_max=4, tree_tokens=8, min_token_prob=0.1)
ARGUMENTS: list[tuple[SpeculativeConfig, dict[str, Any]]] = [
    (LOOKUP, {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 4}),
    (KEPT, {"method": "draft_model", "num_speculative_tokens": 3, "model": "best.draft"}),
    (RETRIEVAL, {
        "method": "suffix", "num_speculative_tokens": 6, "suffix_decoding_max_tree_depth": 10,
        "suffix_decoding_max_spec_factor": 2.0, "suffix_decoding_min_token_prob": 0.1,
    }),
]  # fmt: skip


@pytest.mark.parametrize(("config", "arguments"), ARGUMENTS)
def test_vllm_gets_its_arguments_in_one_option(config: SpeculativeConfig, arguments: dict[str, Any]) -> None:
    entry = _entry("vllm", config)
    assert entry["command"][:3] == ["vllm", "serve", "Org/Model"]
    assert entry["arguments"] == json.loads(_option(entry["command"], "--speculative-config")) == arguments


def test_what_vllm_drafts_otherwise_or_not_at_all_is_stated() -> None:
    names = "lookup", "last lookup", "kept layers"
    first, last, kept = ({note.partition(":")[0] for note in _entry("vllm", CONFIGS[name])["differs"]} for name in names)
    assert "config.match" in last - first
    assert kept == {"config.mask", "config.stop"}
    stored = _entry("vllm", SpeculativeConfig("retrieval", 6, datastore="store"))
    assert stored["reason"].startswith("config.method: retrieval: no engine drafts from a datastore")


def test_an_export_of_a_cpu_starts_the_server_that_its_wheel_has() -> None:
    measured = {"device": "cpu", "backend": {"name": "vllm", "args": ["--max-model-len", "2048"]}}
    command = describe_engines(replace(deployment(LOOKUP), environment=measured))["vllm"]["command"]
    assert command[:5] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "Org/Model"]
    assert _option(command, "--max-model-len") == "2048"
    assert _option(command, "--speculative-config") == _option(_entry("vllm", LOOKUP)["command"], "--speculative-config")
    measured = {"device": "cuda", "backend": {"name": "server", "args": ["--max-model-len", "2048"]}}
    assert describe_engines(replace(deployment(LOOKUP), environment=measured))["vllm"] == _entry("vllm", LOOKUP)


def test_a_published_head_of_eagle_3_is_for_the_engines_that_load_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    (tmp_path / "model.safetensors").touch()
    engines = describe_engines(deployment(SpeculativeConfig("eagle", 3, head=str(tmp_path), top_k=1)))
    methods = {name: entry["method"] for name, entry in engines.items() if "method" in entry}
    third = {"vllm": "eagle3", "sglang": "EAGLE3", "tensorrt_llm": "Eagle3DecodingConfig"}
    assert methods == third | {"transformers": "custom_generate"}


def test_what_engines_cannot_load_is_written_before() -> None:
    """Kept layers, targets that are no folder, and models of llama.cpp."""
    written = ["python", "-m", "searches.export", "outputs/mine/best.json", "draft=outputs/mine/best.draft"]
    assert _entry("vllm", KEPT, file="outputs/mine/best.json")["prepare"] == [written]
    for name in ("smollm2", "model.gguf"):
        entry = _entry("vllm", LOOKUP, name=name, revision=None)
        assert entry["prepare"] == [["python", "-m", "searches.export", "best.json", "model=best.model"]]
        assert entry["command"][2] == "best.model"
    entry = _entry("llama_cpp", CONFIGS["lookup then model"])
    made = [_option(words, "--outfile") for words in entry["prepare"] if "convert_hf_to_gguf.py" in words]
    assert made == [_option(entry["command"], "--model"), _option(entry["command"], "--spec-draft-model")]


def test_a_call_of_transformers_generates_the_text_of_plain_decoding(
    tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "the cat in the hat, the cat in the"
    cascade = SpeculativeConfig("cascade", members=(LOOKUP, SpeculativeConfig("token_recycling", 3)))
    export = Export(tiny_target.describe(), cascade)
    export.save(tmp_path / "best.json")
    exec(export.engines(tmp_path / "best.json")["transformers"]["call"], {"prompt": prompt})
    inputs = tiny_target.tokenizer(prompt, return_tensors="pt")
    output = tiny_target.model.generate(**inputs, max_new_tokens=64, do_sample=False)
    expected = tiny_target.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize("engine", ["tensorrt_llm", "openvino_genai", "transformers"])
def test_a_call_is_python_with_the_values_that_it_states(engine: str) -> None:
    for name in RUNNABLE["openvino_genai"] & RUNNABLE[engine]:
        entry = _entry(engine, CONFIGS[name], sampling=NUCLEUS)
        given: dict[str | None, Any] = {}
        for node in ast.walk(ast.parse(entry["call"])):
            if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
                given[node.arg] = node.value.value
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


def _run(engine: str, script: str, given: object) -> Any:
    """Returns the result that a script prints in the interpreter of an engine."""
    words = [interpreter(engine), "-c", script]
    done = subprocess.run(words, input=json.dumps(given), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("result "))
    return json.loads(line.removeprefix("result "))


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
print("result", json.dumps(parsed))
"""


@pytest.mark.slow
def test_vllm_itself_parses_its_commands() -> None:
    commands = [_entry("vllm", CONFIGS[name])["command"] for name in sorted(RUNNABLE["vllm"])]
    assert _run("vllm", _PARSE_VLLM, commands) == [["Org/Model", "float32", "abc", []]] * len(commands)


_CHECK_OPENVINO = """
import json, sys, openvino_genai
for fields in json.load(sys.stdin):
    openvino_genai.GenerationConfig(max_new_tokens=8, **fields).validate()
print("result", 0)
"""


@pytest.mark.slow
def test_openvino_genai_itself_accepts_its_arguments() -> None:
    entries = [
        _entry("openvino_genai", CONFIGS[name], sampling=sampling)
        for name in sorted(RUNNABLE["openvino_genai"])
        for sampling in (Sampling(), NUCLEUS)
    ]
    fields = [entry.get("arguments", {}) | entry["request"] for entry in entries]
    assert _run("openvino_genai", _CHECK_OPENVINO, fields) == 0

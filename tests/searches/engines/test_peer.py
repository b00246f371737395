"""Engines as rows of a benchmark: the process that runs them, its settings and counting, and its end, whatever happens."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from layerskip import PromptSet, Sampling, SpeculativeConfig, Target, UnsupportedModel, generate, load_target
from layerskip.measure.measure import Decoder, Task
from searches.app.checks import InputError
from searches.app.composition import compose_config
from searches.benchmark.contenders import _present, check_rows
from searches.engines import peer as peers
from searches.engines import worker as engine_worker
from searches.engines.peer import ADAPTERS, EnginePeer, interleave_alive
from tests.engines.known import SIZES, interpreter
from tests.searches.engines.packages import OPENVINO, OPENVINO_GENAI, VLLM, XLLAMACPP
from tests.tiny import save_gguf, save_tiny

pytestmark = pytest.mark.system

PROMPT = [5, 6, 7]


def _peer(target: Target, tmp_path: Path, python: str, method: str = "plain") -> EnginePeer:
    options: dict[str, Any] = {"num_speculative_tokens": 4, "dtype": "bfloat16"}
    return EnginePeer(target, tmp_path / "engines", "openvino_genai", method, python, **options)


@pytest.mark.parametrize("method", ["plain", "prompt_lookup"])
def test_tokens_are_counted_as_for_the_others(target: Target, tmp_path: Path, python: str, method: str) -> None:
    known: list[int] = []
    with contextlib.closing(_peer(target, tmp_path, python, method)) as peer:
        result = peer(PROMPT, Task(max_new_tokens=6), known.append)
        again = peer([9], Task(max_new_tokens=1), lambda _: None)
    peer.close()
    assert not peer.is_running
    assert (result.tokens, known) == ([8, 9, 10, 11, 12, 13], [1])
    assert [done.committed for done in result.stats.rounds] == [2, 2, 1]
    assert (again.tokens, peer.version) == ([10], "1.2")
    assert peer.precision == {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "bf16"}  # not all is as asked
    converted = max((tmp_path / "engines").iterdir(), key=lambda path: path.name)
    assert converted.name.endswith("-openvino")
    (tmp_path / "packages" / "optimum" / "commands" / "optimum_cli.py").unlink()  # a model is converted once
    _peer(target, tmp_path, python).close()


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("convert", "cannot convert .*: an unknown architecture$"),
        ("load", "ended with exit code 1, before it answered: RuntimeError: no such"),
        ("decode", "ended with exit code 3, before it answered$"),
    ],
)
def test_an_engine_that_breaks_is_reported_in_one_line(
    target: Target, tmp_path: Path, python: str, where: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKEN", where)
    reported = pytest.raises(UnsupportedModel, match=f"^openvino_genai: .*{words}")
    with reported as raised, contextlib.closing(_peer(target, tmp_path, python)) as peer:
        peer(PROMPT, Task(max_new_tokens=6), lambda _: None)
    assert "\n" not in str(raised.value)
    assert any(path.name.endswith("-openvino") for path in (tmp_path / "engines").iterdir()) == (where != "convert")


def test_contenders_decode_on_without_an_engine_that_ends(
    target: Target, tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKEN", "decode")
    prompts, plain = PromptSet.of(["the cat", "the dog"]), Decoder.of(target, SpeculativeConfig())
    with contextlib.closing(_peer(target, tmp_path, python)) as peer:
        rows, ended = interleave_alive(target, prompts, {"plain": plain, "engine": peer}, Task(max_new_tokens=6), repeats=2)
    assert [(list(row), row["plain"].prompt_id) for row in rows] == [(["plain"], item.id) for item in prompts] * 2
    assert ended.keys() == {"engine"} and ended["engine"].startswith("openvino_genai: ended with exit code 3")


def test_bad_settings_are_refused_by_field(target: Target, tmp_path: Path, python: str) -> None:
    for changes, field in (
        ({"engine": "sglang"}, "engine"),
        ({"method": "eagle"}, "method"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "draft_model"}, "draft_model"),
        ({"python": str(tmp_path / "absent")}, "python"),
    ):
        fields = {"engine": "vllm", "method": "plain", "python": python} | changes
        with pytest.raises(InputError, match=f"^{field}: "):
            EnginePeer(target, tmp_path / "engines", **fields)  # type: ignore[arg-type]
    with contextlib.closing(_peer(target, tmp_path, python)) as peer, pytest.raises(InputError, match="^sampling: "):
        peer(PROMPT, Task(Sampling(temperature=1.0)), lambda _: None)


def test_rows_of_engines_that_are_not_installed_are_left_out(python: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = compose_config("benchmark", [])
    check_rows(config)
    assert not any("engine" in row for row in _present(config.peers).values())
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "not installed" in line)
    assert line.startswith("openvino, openvino_prompt_lookup, llama_cpp, ")
    config = compose_config("benchmark", [f"peers.openvino.python={python}"])
    rows = {name: row for name, row in _present(config.peers).items() if "engine" in row}
    assert rows.keys() == {"openvino", "openvino_prompt_lookup"}
    assert {row.python for row in rows.values()} == {python}
    with pytest.raises(InputError, match=r"^peers.openvino.exit_layer: "):
        check_rows(compose_config("benchmark", ["+peers.openvino.exit_layer=2"]))


_FIFTH = """
import json
LOADS = "folder"
def command(settings):
    return "toy " + settings["model"]
class Engine:
    def __init__(self, settings):
        import math  # stands for the engine's package
        self.version, self.precision = "7", {"dtype": settings["dtype"]}
        self.drafted = settings["speculative_config"].get("num_speculative_tokens", 0)
    def decode(self, request, on_round):
        tokens = [request["tokens"][-1] + 1 + place for place in range(request["max_new_tokens"])]
        for begin in range(0, len(tokens), 1 + self.drafted):
            on_round(len(tokens[begin : begin + 1 + self.drafted]))
        return tokens
"""


def test_a_fifth_engine_is_one_file(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.py").write_text(_FIFTH)
    monkeypatch.setattr(peers, "ADAPTERS", tmp_path)
    monkeypatch.setattr(peers, "ENGINES", (*peers.ENGINES, "toy"))
    for method, rounds in (("plain", [1, 1, 1]), ("prompt_lookup", [2])):
        peer = EnginePeer(target, tmp_path / "engines", "toy", method, sys.executable, num_speculative_tokens=1)
        with contextlib.closing(peer):
            result = peer(PROMPT, Task(max_new_tokens=4), lambda _: None)
        assert result.tokens == [8, 9, 10, 11] and peer.version == "7" and peer.command().startswith("toy ")
        assert [done.committed for done in result.stats.rounds] == rounds


def test_an_engine_that_answers_nonsense_is_reported_and_ended(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy.py").write_text(_FIFTH.replace("        return tokens", "        return [-1, 3]"))
    monkeypatch.setattr(peers, "ADAPTERS", tmp_path)
    monkeypatch.setattr(peers, "ENGINES", ("toy",))
    peer = EnginePeer(target, tmp_path / "engines", "toy", "plain", sys.executable)
    with contextlib.closing(peer), pytest.raises(UnsupportedModel, match=r"^toy: .* not in the vocabulary$"):
        peer(PROMPT, Task(max_new_tokens=4), lambda _: None)
    assert not peer.is_running


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "method"),  # OpenVINO's draft models need a tokenizer that its converter knows
    [("openvino_genai", "plain"), ("openvino_genai", "prompt_lookup")]
    + [("vllm", method) for method in ("plain", "prompt_lookup", "draft_model")],
)
def test_the_engine_itself_gives_the_output_of_plain_decoding(engine: str, method: str, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0}  # not the default of any version of transformers
    loaded = load_target(str(save_tiny(tmp_path / "loaded", rope_parameters=rope, **SIZES)), dtype="float32", device="cpu")
    loaded.save(tmp_path / "target")
    target = load_target(str(tmp_path / "target"), dtype="float32", device="cpu")
    draft = str(save_tiny(tmp_path / "draft", **SIZES | {"seed": 1})) if method == "draft_model" else ""
    peer = EnginePeer(target, tmp_path / "engines", engine, method, interpreter(engine), draft_model=draft)
    prompt = target.tokenizer("the cat in the hat, the cat in the")["input_ids"]
    with contextlib.closing(peer):
        result = peer(prompt, Task(max_new_tokens=32), lambda _: None)
    assert result.tokens == list(generate(target, prompt, max_new_tokens=32).tokens)
    assert sum(done.committed for done in result.stats.rounds) + 1 >= len(result.tokens) > 1


_VLLM_MODULES = ("vllm", "vllm.engine", "vllm.engine.arg_utils", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.async_llm")
_VLLM_MODULES += ("vllm.inputs", "vllm.sampling_params")
_LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
_DRAFT = {"method": "draft_model", "num_speculative_tokens": 4, "model": "a folder"}
_SETTINGS = {"dtype": "float32", "threads": 1, "max_length": 64}
_REQUEST = {"tokens": [5, 6, 7], "max_new_tokens": 6, "eos": [300], "repetition_penalty": 1.0}


def _module(name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    exec(source, module.__dict__)
    return module


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in for vLLM, which is installed in this process."""
    module = _module("vllm", VLLM)
    for name in _VLLM_MODULES:
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    return module


def _decoded(
    engine: str, speculative: Any, model: Path, end: int
) -> tuple[dict[str, Any], list[tuple[list[int], list[int]]]]:
    """Return what an engine says of itself, and tokens and lengths of two texts, the second with an end of sequence."""
    settings = _SETTINGS | {"speculative_config": speculative, "model": str(model)}
    output, adapter = io.StringIO(), engine_worker.load_adapter(str(ADAPTERS / f"{engine}.py"))
    engine_worker._serve(adapter, [json.dumps(line) for line in (settings, _REQUEST, _REQUEST | {"eos": [end]})], output)
    ready, *answers = (json.loads(line) for line in output.getvalue().splitlines())
    assert answers[::2] == [{"first": 1}] * 2
    return ready, [(answer["tokens"], answer["lengths"]) for answer in answers[1::2]]


def test_a_pipeline_of_openvino_reads_prompts_whole_in_the_precision_of_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[dict[str, Any]] = []
    openvino = _module("openvino_genai", OPENVINO_GENAI)
    monkeypatch.setitem(sys.modules, "openvino_genai", openvino)
    monkeypatch.setitem(sys.modules, "openvino", _module("openvino", OPENVINO))
    (tmp_path / "converted.json").write_text('{"from": "a model"}')

    class Recording(openvino.LLMPipeline):
        def __init__(self, folder: str, device: str, **options: Any) -> None:
            made.append({"device": device, **options})
            super().__init__(folder, device, **options)

    monkeypatch.setattr(openvino, "LLMPipeline", Recording)
    ready, texts = _decoded("openvino_genai", _LOOKUP, tmp_path, end=10)
    assert ready.keys() == {"version", "precision"} and ready["version"] == "1.2"
    assert texts == [([8, 9, 10, 11, 12, 13], [1, 3, 5, 6]), ([8, 9, 10], [1, 3])]
    (options,) = made
    assert not options.pop("scheduler_config").enable_prefix_caching
    precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
    assert options == {"device": "CPU", "prompt_lookup": True, **precision}
    _decoded("openvino_genai", _DRAFT, tmp_path, end=10)
    assert made[-1]["draft_model"] == ("a folder", "CPU", precision) and "prompt_lookup" not in made[-1]


@pytest.mark.parametrize(("speculative", "lengths"), [({}, [1, 2, 3, 4, 5, 6]), (_LOOKUP, [1, 6])])
def test_rounds_of_vllm_are_the_parts_of_its_stream(
    vllm: ModuleType, speculative: Any, lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It decodes with as many cores as the others."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {6, 3, 5})
    ready, texts = _decoded("vllm", speculative, tmp_path, end=8)
    assert (ready["version"], ready["precision"]) == ("3.4", {"dtype": "torch.float32", "cache": "auto"})
    assert texts == [([8, 9, 10, 11, 12, 13], lengths), ([8], [1])]
    arguments = vllm.AsyncLLM.made[-1].arguments
    assert arguments.speculative_config == (speculative or None)
    assert (arguments.dtype, arguments.max_model_len, arguments.max_num_seqs) == ("float32", 64, 1)
    assert arguments.enable_prefix_caching is False
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "3"


@pytest.mark.parametrize(("speculative", "accepted", "lengths"), [({}, 0, [1, 2, 3, 4, 5, 6]), (_LOOKUP, 3, [1, 3, 6])])
def test_llama_cpp_reads_the_file_of_the_target(
    speculative: Any, accepted: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = _module("xllamacpp", XLLAMACPP)
    module.Server.accepted = accepted
    monkeypatch.setitem(sys.modules, "xllamacpp", module)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    ready, texts = _decoded("xllamacpp", speculative, tmp_path / "model.gguf", end=10)
    assert (ready["version"], ready["precision"]["cache"], ready["precision"]["build"]) == ("5.6", "f16", "AVX2 = 1")
    assert texts == [([8, 9, 10, 11, 12, 13], lengths), ([8, 9, 10], [1, 3] if accepted else [1, 2, 3])]
    params = module.Server.made[-1]
    assert params.model.path == str(tmp_path / "model.gguf")
    drafting = params.speculative.types, params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m
    assert drafting == ((["n-grams"], 3, 4) if speculative else ([], 0, 0))
    _decoded("xllamacpp", _DRAFT, tmp_path / "model.gguf", end=10)
    drafting = module.Server.made[-1].speculative
    assert (drafting.types, drafting.draft.mparams.path, drafting.draft.n_max) == (["a draft"], "a folder", 4)


@pytest.mark.parametrize("method", ["plain", "prompt_lookup"])
def test_the_command_of_an_engine_has_the_model_and_the_lengths_of_the_peer(
    target: Target, tmp_path: Path, python: str, method: str
) -> None:
    names = f"import sys\nsys.modules |= dict.fromkeys({_VLLM_MODULES}, sys.modules[__name__])\n"
    (tmp_path / "packages" / "vllm.py").write_text(VLLM + names)
    (tmp_path / "packages" / "xllamacpp.py").write_text(XLLAMACPP)
    file = save_gguf(Path(target.name), tmp_path / "model.gguf")
    options: dict[str, Any] = {"num_speculative_tokens": 4, "prompt_lookup_max": 2}
    commands = {}
    for engine, own in (("vllm", target), ("xllamacpp", load_target(str(file), dtype="float32", device="cpu"))):
        with contextlib.closing(EnginePeer(own, tmp_path / "engines", engine, method, python, **options)) as peer:
            commands[engine] = shlex.split(peer.command())
    vllm, llama = commands["vllm"], commands["xllamacpp"]
    start = vllm.index("-m")
    assert vllm[0] == "env" and "VLLM_CPU_OMP_THREADS_BIND" in " ".join(vllm[:start]) and vllm[start - 1] == python
    assert vllm[start + 1] == "vllm.entrypoints.openai.api_server"
    assert Path(vllm[vllm.index("--model") + 1], "model.safetensors").is_file()
    assert vllm[vllm.index("--dtype") + 1] == "float32" and "--no-enable-prefix-caching" in vllm
    drafting = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    given = [json.loads(text) for name, text in itertools.pairwise(vllm) if name == "--speculative-config"]
    assert given == ([] if method == "plain" else [drafting])
    assert llama[:2] == [python, "-c"] and f"params.model.path = {str(file)!r}" in llama[2]
    assert ("ngram_simple.size_m = 2, 4" in llama[2]) == (method == "prompt_lookup")
    with subprocess.Popen(llama, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline().startswith("http://")
        server.kill()


def test_llama_cpp_is_left_out_where_there_is_no_gguf_file(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"^xllamacpp: .* is not a GGUF file$"):
        EnginePeer(target, tmp_path, "xllamacpp", "plain", sys.executable)

"""The doctor on real servers of tiny models, where an interpreter that has the engine is named. vLLM's start in parallel."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from layerskip.engines.registry import API_SERVER
from searches.backends.client import Client
from searches.backends.engine_process import EngineProcess, free_port
from tests.engines.known import SIZES, interpreter
from tests.searches.conftest import Launch
from tests.tiny import save_gguf, save_tiny

pytestmark = pytest.mark.slow

Examine = Callable[..., "subprocess.CompletedProcess[str]"]
_LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
_ACCEPTING_ALL = """
from vllm.v1.sample import rejection_sampler
judge = rejection_sampler.rejection_sample

def accept(drafted, counts, longest, ends, chances, logits, *others, **more):
    likeliest = logits.scatter(1, drafted.long()[:, None], float("inf"))
    return judge(drafted, counts, longest, ends, chances, likeliest, *others, **more)

def register():
    rejection_sampler.rejection_sample = accept
"""
"""A plugin of vLLM, whose own lossy rule of acceptance (``synthetic``) does not run on a CPU."""
_LLAMA_CPP = """
import json, sys, threading, xllamacpp
params, (file, port, options) = xllamacpp.CommonParams(), sys.argv[1:]
params.model.path, params.port, params.endpoint_metrics = file, int(port), True
params.n_ctx, params.n_parallel = 1024, 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
if json.loads(options):
    params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = 1, 2
    params.speculative.synth_rates = json.loads(options)["synth_rates"]
server = xllamacpp.Server(params)
threading.Event().wait()
"""


@contextlib.contextmanager
def _servers(commands: Mapping[str, tuple[list[str], dict[str, str]]]) -> Iterator[dict[str, str]]:
    """Start servers whose commands, with variables, lack the port alone, and yield their addresses."""
    with contextlib.ExitStack() as stack:
        found, started = {}, []
        for name, (command, variables) in commands.items():
            port = str(free_port())
            process = EngineProcess([port if word == "PORT" else word for word in command], os.environ | variables, name)
            stack.callback(process.stop)
            started.append((process, Client(f"http://127.0.0.1:{port}")))
            found[name] = f"http://127.0.0.1:{port}"
        for process, client in started:
            process.wait_until(client.ready, 300)
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose outputs repeat themselves."""
    return save_tiny(tmp_path_factory.mktemp("real") / "llama", idle=range(4), intermediate_size=64, **SIZES)


@pytest.fixture(scope="module")
def vllm(model: Path) -> Iterator[dict[str, str]]:
    """Addresses of vLLM with good, bad, no and lossy speculation."""
    random = save_tiny(model.parent / "random", seed=1, intermediate_size=64, **SIZES)
    drafting = {
        "plain": None,
        "good": _LOOKUP,
        "bad": {"method": "draft_model", "model": str(random), "num_speculative_tokens": 16},
        "lossy": _LOOKUP,
    }
    entry = model.parent / "plugins" / "lossy-1.dist-info" / "entry_points.txt"
    entry.parent.mkdir(parents=True)
    entry.write_text("[vllm.general_plugins]\nlossy = lossy:register\n", encoding="utf-8")
    (entry.parent.parent / "lossy.py").write_text(_ACCEPTING_ALL, encoding="utf-8")
    command = [interpreter("vllm"), "-m", API_SERVER, "--model", str(model), "--host", "127.0.0.1", "--port", "PORT"]
    command += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    added = {name: ["--speculative-config", json.dumps(given)] if given else [] for name, given in drafting.items()}
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    of_lossy = {"PYTHONPATH": str(entry.parent.parent)}
    commands = {name: (command + more, environment | (of_lossy if name == "lossy" else {})) for name, more in added.items()}
    with _servers(commands) as found:
        yield found


@pytest.fixture(scope="module")
def llama_cpp(model: Path) -> Iterator[dict[str, str]]:
    """Addresses of llama.cpp with good, no and lossy speculation."""
    file = save_gguf(model, model.parent / "tiny.gguf")
    options = {"plain": {}, "good": {"synth_rates": []}, "lossy": {"synth_rates": [1.0, 1.0]}}
    command = [interpreter("xllamacpp"), "-c", _LLAMA_CPP, str(file), "PORT"]
    with _servers({name: ([*command, json.dumps(given)], {}) for name, given in options.items()}) as found:
        yield found


@pytest.fixture
def examine(tmp_path: Path, launch: Launch) -> Examine:
    """Runs the doctor on a server with a few short prompts."""
    prompts = [json.dumps({"prompt": f"one {number} two one {number} two"}) for number in range(6)]
    (tmp_path / "mine.jsonl").write_text("\n".join(prompts), encoding="utf-8")
    mine = ("prompts=jsonl", "prompts.path=mine.jsonl", "max_new_tokens=48")
    return lambda url, *more: launch("doctor", url, *mine, *more, cwd=tmp_path)


_SAME, _JUDGED = "on 0 of 6 prompts, and the plain server's from itself on 0", "token in 0 of 288 places"
_LOSSY = "is not that of plain decoding"


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("good", 0, ("speculation: on", "by position 0.", _JUDGED, _SAME)),
        ("bad", 1, ("speculation: on", "100% of the rounds", _JUDGED, _SAME, "leave speculation off")),
        ("plain", 0, ("speculation: off", _JUDGED, _SAME, "Try --speculative-config")),
        ("lossy", 1, ("speculation: on", "on 6 of 6 prompts", _LOSSY)),
    ],
)
def test_vllm_is_named_for_what_it_is(
    name: str, code: int, words: tuple[str, ...], vllm: dict[str, str], examine: Examine
) -> None:
    done = examine(vllm[name], f"plain={vllm['plain']}")
    assert all(word in done.stdout for word in words), done.stdout
    assert done.returncode == code


@pytest.mark.parametrize(("name", "code", "words"), [("good", 0, f"{_JUDGED}\n"), ("lossy", 1, _LOSSY)])
def test_vllm_judges_its_own_output(name: str, code: int, words: str, vllm: dict[str, str], examine: Examine) -> None:
    done = examine(vllm[name])
    assert words in done.stdout, done.stdout
    assert done.returncode == code


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("good", 0, ("speculation: on", "by position 0.", _SAME)),
        ("plain", 0, ("speculation: off", _SAME, "Try --spec-type ngram-simple")),
        ("lossy", 1, ("speculation: on", _LOSSY, "--spec-synth-rates")),
    ],
)
def test_llama_cpp_is_named_for_what_it_is(
    name: str, code: int, words: tuple[str, ...], llama_cpp: dict[str, str], examine: Examine
) -> None:
    done = examine(llama_cpp[name], f"plain={llama_cpp['plain']}")
    assert all(word in done.stdout for word in words), done.stdout
    assert done.returncode == code

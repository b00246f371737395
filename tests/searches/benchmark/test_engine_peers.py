"""Engines as rows of a benchmark: the process that runs them, its counting, and its end, whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from layerskip import Sampling, SkipMask, Target, UnsupportedModel, generate, load_target, save_draft_checkpoint
from layerskip.measure.measure import Task
from searches.app.checks import InputError
from searches.app.composition import compose_config
from searches.benchmark import peers
from searches.benchmark.contenders import _present, check_rows
from searches.benchmark.peers import WORKER, EnginePeer
from tests.engines.known import SIZES, interpreter
from tests.searches.backends.processes import is_running
from tests.searches.benchmark.engine_packages import OPENVINO, OPENVINO_GENAI
from tests.tiny import save_tiny

pytestmark = pytest.mark.system

PROMPT = [5, 6, 7]
_CONVERTER = """
import json, os, sys
if os.environ.get("BROKEN") == "convert":
    sys.exit("loading\\nan unknown architecture\\n")
folder = sys.argv[-1]
os.makedirs(folder)
source = sys.argv[sys.argv.index("--model") + 1]
assert os.path.exists(os.path.join(source, "model.safetensors"))
json.dump({"from": source}, open(os.path.join(folder, "converted.json"), "w"))
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(str(save_tiny(tmp_path_factory.mktemp("target"))), dtype="float32", device="cpu")


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter in which stand-ins of the engine's packages are installed."""
    packages = tmp_path / "packages"
    (packages / "optimum" / "commands").mkdir(parents=True)
    (packages / "openvino_genai.py").write_text(OPENVINO_GENAI)
    (packages / "openvino.py").write_text(OPENVINO)
    (packages / "optimum" / "commands" / "optimum_cli.py").write_text(_CONVERTER)
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


def _peer(target: Target, tmp_path: Path, python: str, method: str = "plain") -> EnginePeer:
    return EnginePeer(target, tmp_path / "engines", "openvino_genai", method, python, num_speculative_tokens=4)


@pytest.mark.parametrize("method", ["plain", "prompt_lookup"])
def test_tokens_are_counted_as_for_the_others(target: Target, tmp_path: Path, python: str, method: str) -> None:
    known: list[int] = []
    with contextlib.closing(_peer(target, tmp_path, python, method)) as peer:
        worker = peer._process.pid
        result = peer(PROMPT, Task(max_new_tokens=6), known.append)
        again = peer([9], Task(max_new_tokens=1), lambda _: None)
    peer.close()
    assert not is_running(worker)
    assert (result.tokens, known) == ([8, 9, 10, 11, 12, 13], [1])
    assert [done.committed for done in result.stats.rounds] == [2, 2, 1]
    assert (again.tokens, peer.version) == ([10], "1.2")
    converted = max((tmp_path / "engines").iterdir(), key=lambda path: path.name)
    assert converted.name.endswith("-openvino")
    (tmp_path / "packages" / "optimum" / "commands" / "optimum_cli.py").unlink()  # a model is converted once
    _peer(target, tmp_path, python).close()


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("convert", "cannot convert .*: an unknown architecture$"),
        ("load", "RuntimeError: no such model"),
        ("decode", "it ended: the last words"),
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


def test_a_worker_that_does_not_end_with_its_input_is_killed(
    target: Target, tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_CLOSING_SECONDS", 0.05)
    peer = _peer(target, tmp_path, python)
    os.kill(peer._process.pid, signal.SIGSTOP)
    peer.close()
    assert peer._process.returncode == -signal.SIGKILL


_KILLED = """
import os, subprocess, sys
command = [sys.argv[1], sys.argv[2], str(os.getpid())]
worker = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
print(worker.pid, flush=True)
os.set_inheritable(worker.stdin.fileno(), True)
subprocess.Popen(["sleep", "60"], close_fds=False)  # keeps the worker's input open
os.kill(os.getpid(), 9)
"""


def test_a_worker_ends_when_its_program_is_killed(python: str) -> None:
    """It does so while it loads an engine, too, when it reads no input."""
    killed = [sys.executable, "-c", _KILLED, python, str(WORKER)]
    with subprocess.Popen(killed, stdout=subprocess.PIPE, text=True, start_new_session=True) as program:
        assert program.stdout is not None
        worker = int(program.stdout.readline())
        program.wait()
        while is_running(worker):
            time.sleep(0.05)
        os.killpg(program.pid, signal.SIGKILL)


def test_bad_settings_are_refused_by_field(target: Target, tmp_path: Path, python: str) -> None:
    for changes, field in (
        ({"engine": "sglang"}, "engine"),
        ({"method": "eagle"}, "method"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
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
    assert line.startswith("openvino, openvino_prompt_lookup, openvino_assistant, vllm, ")
    config = compose_config("benchmark", [f"peers.openvino.python={python}", "draft_folder=drafts"])
    rows = {name: row for name, row in _present(config.peers).items() if "engine" in row}
    assert {name: row.python for name, row in rows.items()} == dict.fromkeys(
        ("openvino", "openvino_prompt_lookup", "openvino_assistant"), python
    )
    with pytest.raises(InputError, match=r"^peers.openvino.exit_layer: "):
        check_rows(compose_config("benchmark", ["+peers.openvino.exit_layer=2"]))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["openvino_genai", "vllm"])
@pytest.mark.parametrize("method", ["plain", "prompt_lookup", "assistant"])
def test_the_engine_itself_gives_the_output_of_plain_decoding(engine: str, method: str, tmp_path: Path) -> None:
    target = load_target(str(save_tiny(tmp_path / "target", **SIZES)), dtype="float32", device="cpu")
    draft = save_draft_checkpoint(target, SkipMask.parse("layers:1-2", target.layers), tmp_path / "draft_model")
    peer = EnginePeer(target, tmp_path / "engines", engine, method, interpreter(engine), draft_model=str(draft))
    prompt = target.tokenizer("the cat in the hat, the cat in the")["input_ids"]
    try:
        result = peer(prompt, Task(max_new_tokens=32), lambda count: None)
    finally:
        peer.close()
    assert result.tokens == list(generate(target, prompt, max_new_tokens=32).tokens)
    assert sum(done.committed for done in result.stats.rounds) + 1 >= len(result.tokens) > 1

"""The real vLLM, where ``LAYERSKIP_VLLM_PYTHON`` names an interpreter that has it. Each start takes tens of seconds."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from layerskip import Export, SkipMask, SpeculativeConfig, Target, generate, load_target, save_draft_checkpoint
from layerskip.heads.eagle import read_modules
from layerskip.heads.medusa import MedusaHeads, MedusaShape
from layerskip.measure.measure import Task
from layerskip.models.trained_module import save_trained
from searches.backends.backend import BackendError
from searches.backends.client import Client
from searches.backends.engine_process import EngineProcess, free_port
from searches.backends.vllm import VllmBackend
from searches.exporting.program import script
from tests.engines.known import interpreter
from tests.searches.backends.contract import PROMPTS, TASK, BackendContract, FailingEngine, ServesSeveral, children
from tests.searches.backends.test_vllm import save_head
from tests.searches.conftest import Launch
from tests.tiny import save_tiny

ARGS = ("--max-model-len", "512", "--enforce-eager")
LOOKUP = SpeculativeConfig("prompt_lookup", 3, match="first")
_SIDES = ("baseline", "candidate")
SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
"""The heads are as wide as vLLM's attention on a CPU needs."""


@pytest.fixture(scope="module")
def python() -> str:
    return interpreter("vllm")


@pytest.fixture(scope="module")
def tiny_target(python: str, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = save_tiny(tmp_path_factory.mktemp("real") / "llama", idle=(1,), **SIZES)
    return load_target(str(folder), dtype="float32", device="cpu")


class TestContract(BackendContract, FailingEngine, ServesSeveral):
    @pytest.fixture
    def make(self, python: str, tmp_path: Path) -> Callable[[Target], VllmBackend]:
        return lambda target: VllmBackend(target, python=python, args=ARGS, folder=str(tmp_path))

    @pytest.fixture
    def broken(self) -> SpeculativeConfig:
        return SpeculativeConfig("prompt_lookup", 100000)


@pytest.fixture(scope="module")
def backend(python: str, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmBackend]:
    backend = VllmBackend(tiny_target, python=python, args=ARGS, folder=str(tmp_path_factory.mktemp("served")))
    yield backend
    backend.close()


def _config(kind: str, target: Target, folder: Path) -> SpeculativeConfig:
    """Return a configuration with a drafter that is made in a folder."""
    if kind == "draft_model":
        draft = save_draft_checkpoint(target, SkipMask.of(target.layers, {1}, {1}), folder / "draft")
        return SpeculativeConfig("draft_model", 2, draft=str(draft))
    if kind == "eagle":
        save_head(target, folder / "head")
        return SpeculativeConfig("eagle", 2, head=str(folder / "head"), candidates=1)
    if kind == "medusa":
        torch.manual_seed(1)
        heads = MedusaHeads(MedusaShape(target.hidden, 2, read_modules(target), None), None)
        save_trained(folder / "head", "medusa", heads.shape.to_dict(), dict(heads.state_dict()), target, {})
        return SpeculativeConfig("medusa", 2, head=str(folder / "head"))
    return SpeculativeConfig("retrieval", 6, ngram_max=3, tree_tokens=9) if kind == "retrieval" else LOOKUP


@pytest.mark.parametrize("kind", ["prompt_lookup", "draft_model", "eagle", "medusa", "retrieval"])
def test_greedy_outputs_are_those_of_plain_decoding(
    backend: VllmBackend, tiny_target: Target, kind: str, tmp_path: Path
) -> None:
    if (reason := backend.supports(kind)) is not None:
        pytest.skip(reason)
    measured = backend.measure(_config(kind, tiny_target, tmp_path), PROMPTS, Task(max_new_tokens=24))
    assert measured.lossless.verdict == "exact"
    assert measured.stats.drafted > 0
    for item, sample in zip(PROMPTS, measured.candidate, strict=True):
        assert sample.tokens == len(generate(tiny_target, item.messages(), max_new_tokens=24).tokens)


def test_an_engine_that_hangs_is_an_error_and_leaves_nothing(python: str, tiny_target: Target, tmp_path: Path) -> None:
    before = children()
    backend = VllmBackend(tiny_target, python=python, args=ARGS, folder=str(tmp_path), limit_seconds=5)
    try:
        assert backend.measure(LOOKUP, PROMPTS, TASK).lossless.verdict == "exact"
        engine = backend._running[LOOKUP].process
        assert engine is not None
        for process in children() - before - {engine._guard.pid}:
            os.kill(process, signal.SIGSTOP)
        with pytest.raises(BackendError, match="no answer within 5 seconds"):
            backend.measure(LOOKUP, PROMPTS, TASK)
    finally:
        backend.close()
    assert children() <= before


def test_the_exported_command_serves_the_text_of_plain_decoding_and_is_verified(
    python: str, tiny_target: Target, tmp_path: Path, launch: Launch
) -> None:
    environment = {"device": "cpu", "backend": {"name": "vllm", "args": list(ARGS)}}
    best = tmp_path / "best.json"
    Export(Export.describe(tiny_target), LOOKUP, environment=environment).save(best)
    *_, printed = script("vllm", Export.load(best).engines(best)["vllm"]).splitlines()
    drafting = shlex.split(printed)
    assert drafting[0] == "python"
    drafting[0] = python
    place = drafting.index("--speculative-config")
    commands = [drafting[:place] + drafting[place + 2 :], drafting]
    ports, servers = [free_port(), free_port()], list[EngineProcess]()
    try:
        for command, port in zip(commands, ports, strict=True):
            more = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
            servers.append(EngineProcess([*command, "--port", str(port)], more, "vllm"))
            servers[-1].wait_until(Client(f"http://127.0.0.1:{port}").ready, 300)
        client = Client(f"http://127.0.0.1:{ports[1]}")
        for item in PROMPTS:
            expected = generate(tiny_target, item.messages(), max_new_tokens=24)
            answer = client.complete(tiny_target.encode(item.messages()), Task(max_new_tokens=24))
            assert (answer.text, list(answer.tokens or ())) == (expected.text, list(expected.tokens))
        urls = [f"backend.{name}_url=http://127.0.0.1:{port}" for name, port in zip(_SIDES, ports, strict=True)]
        lines = [json.dumps({"prompt": f"the cat and the cat {place}"}) for place in range(12)]
        (tmp_path / "short.jsonl").write_text("\n".join(lines), encoding="utf-8")
        options = [*urls, "backend=server", "prompts=jsonl", "prompts.path=short.jsonl", "measure.most_repeats=1"]
        options += ["measure.max_new_tokens=12", "target.device=cpu"]
        done = launch("verify", f"export={best}", *options, cwd=tmp_path)
        assert done.returncode in (0, 3, 4), done.stderr  # a verdict; which one depends on the machine
    finally:
        for server in servers:
            server.stop()
    record = json.loads((tmp_path / "outputs" / "verify.json").read_text(encoding="utf-8"))
    assert record["measured"]["losslessness"]["verdict"] == "exact"
    assert record["measured"]["acceptance_rate"] > 0
    assert record["environment"]["backend"]["name"] == "server"

"""The real vLLM, where ``LAYERSKIP_VLLM_PYTHON`` names an interpreter that has it. Each start takes tens of seconds."""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path

import pytest

from layerskip import DraftPlan, Export, SpeculativeConfig, Target, generate, load_target, save_draft_checkpoint
from layerskip.measure.measure import Task
from layerskip.measure.measurement import Measurement
from searches.backends.backend import BASELINE, CANDIDATE, Comparison, Workload
from searches.backends.client import Client
from searches.backends.engine_process import EngineProcess, free_port
from searches.backends.vllm import VllmBackend
from searches.export import script
from tests.engines.known import SIZES, interpreter
from tests.searches.backends.contract import LOOKUP, PROMPTS, measure
from tests.searches.conftest import Launch
from tests.searches.programs import tracked
from tests.tiny import save_tiny

pytestmark = pytest.mark.slow

ARGS = ("--max-model-len", "512", "--enforce-eager")
TOKENS = 48


@pytest.fixture(scope="module")
def python() -> str:
    return interpreter("vllm")


@pytest.fixture(scope="module")
def tiny_target(python: str, tmp_path_factory: pytest.TempPathFactory) -> Target:
    # With layers of little effect, a token mostly follows from the one before, which heads learn in seconds.
    folder = save_tiny(tmp_path_factory.mktemp("real") / "llama", idle=range(4), intermediate_size=64, **SIZES)
    return load_target(str(folder), dtype="float32", device="cpu")


_TRAINING = (
    *("tokens=2000", "max_new_tokens=48", "batch=16", "texts_per_step=8", "learning_rate=0.003", "vocabulary=null"),
    *("held_out_tokens=8", "target=local", "target.dtype=float32", "target.device=cpu", "steps=300", "lookback=0"),
)


def _config(method: str, target: Target, folder: Path, launch: Launch) -> SpeculativeConfig:
    """Return a configuration with a drafter that is made in a folder; heads are trained by ``searches.train``."""
    if method == "prompt_lookup":
        return LOOKUP
    if method == "retrieval":
        return SpeculativeConfig("retrieval", 6, prompt_lookup_max=3, tree_tokens=9)
    if method in ("draft_model", "cross_tokenizer"):
        draft = save_draft_checkpoint(target, DraftPlan.of(target.layers, {1}, {1}), folder / "draft")
        return SpeculativeConfig(method, 2, draft_model=str(draft))
    lines = "".join(f'{{"prompt": "Say {number}."}}\n' for number in range(4))
    (folder / "few.jsonl").write_text(lines, encoding="utf-8")
    options = (f"head={folder}/head", f"target.path={target.name}")
    more = (f"outputs={tracked(folder / 'outputs')}", "prompts=jsonl", "prompts.path=few.jsonl")
    done = launch("train", *_TRAINING, *options, *more, cwd=folder)
    assert done.returncode == 0, done.stderr
    return SpeculativeConfig(method, 2, head=f"{folder}/head", top_k=1)


_LIKE_OURS = ("draft_model", "eagle")  # they draft there what they draft here
_METHODS = ("prompt_lookup", "retrieval", "cross_tokenizer", *_LIKE_OURS)


@pytest.mark.parametrize("method", _METHODS)
def test_greedy_outputs_are_those_of_plain_decoding(
    method: str, python: str, tiny_target: Target, tmp_path: Path, launch: Launch
) -> None:
    backend = VllmBackend(tiny_target, python=python, args=ARGS, folder=str(tmp_path / "served"))
    if (reason := backend.supports(method)) is not None:
        pytest.skip(reason)
    config = _config(method, tiny_target, tmp_path, launch)
    try:
        measured = measure(backend, config, PROMPTS, Task(max_new_tokens=TOKENS))
    finally:
        backend.close()
    assert measured.lossless.verdict == "exact"
    plain = [generate(tiny_target, item.messages(), max_new_tokens=TOKENS) for item in PROMPTS]
    assert [sample.tokens for sample in measured.candidate] == [len(result.tokens) for result in plain]
    assert 0 < measured.stats.accepted <= measured.stats.drafted
    if method in _LIKE_OURS:
        own = [generate(tiny_target, item.messages(), config, max_new_tokens=TOKENS).stats for item in PROMPTS]
        for sample, stats in zip(measured.candidate, own, strict=True):
            # The engine also counts tokens of the last draft that are beyond the text.
            assert stats.accepted <= sample.stats.accepted <= stats.accepted + config.num_speculative_tokens


INT8 = SpeculativeConfig.from_dict({"method": "quantized", "weights": "int8;layers:1=skip", "num_speculative_tokens": 2})


@pytest.mark.parametrize("config", [LOOKUP, INT8])
def test_the_exported_command_serves_the_text_of_plain_decoding(
    config: SpeculativeConfig, python: str, tiny_target: Target, tmp_path: Path, launch: Launch
) -> None:
    environment = {"device": "cpu", "backend": {"name": "vllm", "args": list(ARGS)}}
    best = tmp_path / "best.json"
    Export(tiny_target.describe(), config, environment=environment).save(best)
    entry = Export.load(best).engines(best)["vllm"]
    for words in entry.get("prepare", ()):
        assert words[:3] == ["python", "-m", "searches.export"]
        done = launch("export", *words[3:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    *_, printed = script("vllm", entry).splitlines()
    command = shlex.split(printed)
    assert command[0] == "python"
    command[0] = python
    port = free_port()
    server = EngineProcess([*command, "--port", str(port)], os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}, "vllm")
    try:
        client = Client(f"http://127.0.0.1:{port}")
        server.wait_until(client.ready, 300)
        for item in PROMPTS:
            expected = generate(tiny_target, item.messages(), max_new_tokens=24)
            answer = client.complete(tiny_target.encode(item.messages()), Task(max_new_tokens=24))
            assert (answer.text, list(answer.tokens or ())) == (expected.text, list(expected.tokens))
    finally:
        server.stop()


def test_a_schedule_sets_the_draft_length_by_the_number_of_requests(
    python: str, tiny_target: Target, tmp_path: Path
) -> None:
    schedule = [[1, 1, LOOKUP.num_speculative_tokens], [2, 64, 0]]
    backend = VllmBackend(tiny_target, python=python, args=ARGS, folder=str(tmp_path), schedule=schedule)
    with contextlib.closing(backend):
        alone, together = (
            Measurement.of(
                backend.compare(Comparison({CANDIDATE: LOOKUP}, PROMPTS, Task(max_new_tokens=TOKENS), Workload(count))),
                BASELINE,
                CANDIDATE,
            )
            for count in (1, len(PROMPTS))
        )
    assert alone.lossless.verdict == together.lossless.verdict == "exact"
    assert alone.stats.drafted > 2 * together.stats.drafted  # the last requests of several are alone

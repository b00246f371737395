"""The worker of an engine: its lines, its settings of the engine, and its counting of rounds."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from searches.benchmark import engine_worker
from tests.searches.benchmark.engine_packages import OPENVINO, OPENVINO_GENAI, VLLM

_VLLM_MODULES = ("vllm", "vllm.engine", "vllm.engine.arg_utils", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.async_llm")
_VLLM_MODULES += ("vllm.inputs", "vllm.sampling_params")
_SETTINGS = {
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "draft_model": "drafts",
    "dtype": "float32",
    "threads": 1,
    "max_length": 64,
}
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


def _answers(engine: str, method: str, model: Path, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answers to an engine's settings and requests."""
    settings = _SETTINGS | {"engine": engine, "method": method, "model": str(model)}
    answers = io.StringIO()
    engine_worker._serve([json.dumps(line) for line in (settings, *requests)], answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


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
    monkeypatch.setattr(openvino, "draft_model", lambda folder, device, **options: (folder, options), raising=False)
    ready, *answers = _answers("openvino_genai", "assistant", tmp_path, _REQUEST, _REQUEST | {"eos": [10]})
    assert ready.keys() == {"version", "seconds"} and ready["version"] == "1.2"
    assert answers == [
        {"first": 1},
        {"tokens": [8, 9, 10, 11, 12, 13], "lengths": [1, 3, 5, 6]},
        {"first": 1},
        {"tokens": [8, 9, 10], "lengths": [1, 3]},
    ]
    (options,) = made
    assert not options.pop("scheduler_config").enable_prefix_caching
    precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
    assert options == {"device": "CPU", "draft_model": ("drafts", precision), **precision}


@pytest.mark.parametrize(
    ("method", "speculative", "lengths"),
    [
        ("plain", None, [1, 2, 3, 4, 5, 6]),
        ("prompt_lookup", {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}, [1, 6]),
        ("assistant", {"method": "draft_model", "model": "drafts"}, [1, 6]),
    ],
)
def test_rounds_of_vllm_are_the_parts_of_its_stream(
    vllm: ModuleType, method: str, speculative: Any, lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It decodes with as many cores as the others."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {6, 3, 5}, raising=False)
    ready, *answers = _answers("vllm", method, tmp_path, _REQUEST, _REQUEST | {"eos": [8]})
    assert ready["version"] == "3.4"
    assert answers == [
        {"first": 1},
        {"tokens": [8, 9, 10, 11, 12, 13], "lengths": lengths},
        {"first": 1},
        {"tokens": [8], "lengths": [1]},
    ]
    arguments = vllm.AsyncLLM.made[-1].arguments
    assert arguments.speculative_config == (speculative and speculative | {"num_speculative_tokens": 4})
    assert (arguments.dtype, arguments.max_model_len, arguments.max_num_seqs) == ("float32", 64, 1)
    assert arguments.enable_prefix_caching is False
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "3"

"""vLLM as a back end: its commands, and a real engine where ``LAYERSKIP_VLLM_PYTHON`` names an interpreter that has it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layerskip import (
    AcceptRule,
    PromptSet,
    SkipMask,
    SpeculativeConfig,
    StopRule,
    Target,
    load_target,
    save_draft_checkpoint,
)
from layerskip.measure.measure import Task
from searches.app.checks import InputError
from searches.backends.backend import BackendError, Load
from searches.backends.vllm import VllmBackend
from searches.backends.vllm_speculation import NotServed, refusal, vllm_config
from searches.space.search_space import SearchSpace
from tests.tiny import save_tiny

_PYTHON = os.environ.get("LAYERSKIP_VLLM_PYTHON")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SpeculativeConfig(), None),
        (
            SpeculativeConfig("prompt_lookup", 6, ngram_min=2, ngram_max=4),
            {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
        ),
        (
            SpeculativeConfig("draft_model", 3, draft="a/model"),
            {"method": "draft_model", "num_speculative_tokens": 3, "model": "in a folder: a/model"},
        ),
        (
            SpeculativeConfig("retrieval", 8, ngram_max=4, tree_tokens=16, least_probability=0.2),
            {
                "method": "suffix",
                "num_speculative_tokens": 8,
                "suffix_decoding_max_tree_depth": 12,
                "suffix_decoding_max_spec_factor": 4.0,
                "suffix_decoding_min_token_prob": 0.2,
            },
        ),
    ],
)
def test_configurations_have_the_fields_that_vllm_documents(config: SpeculativeConfig, expected: Any) -> None:
    assert vllm_config(config, lambda name: f"in a folder: {name}") == expected


@pytest.mark.parametrize(
    ("described", "method"),
    [
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}, "eagle3"),
        ({"speculators_model_type": "eagle"}, "eagle"),
    ],
)
def test_the_method_of_a_head_is_read_from_its_folder(tmp_path: Path, described: dict[str, Any], method: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    found = vllm_config(SpeculativeConfig("eagle", 3, head=str(tmp_path)))
    assert found == {"method": method, "num_speculative_tokens": 3, "model": str(tmp_path)}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (SpeculativeConfig("token_recycling"), "kind: "),
        (SpeculativeConfig("layer_skip", mask="layers:1"), "kind: "),
        (SpeculativeConfig("draft_model", draft="a", stop=StopRule("threshold", 0.5)), "stop: "),
        (SpeculativeConfig("draft_model", draft="a", draft_head="b"), "draft_head: "),
        (SpeculativeConfig("prompt_lookup", accept=AcceptRule("typical")), "accept: "),
        (SpeculativeConfig("retrieval", datastore="a"), "datastore: "),
        (SpeculativeConfig("eagle", head="nowhere", candidates=1), "head: "),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_field(config: SpeculativeConfig, named: str) -> None:
    with pytest.raises(NotServed, match=f"^{named}"):
        vllm_config(config)
    assert named != "kind: " or refusal(config.kind)


def test_an_interpreter_without_vllm_is_refused(tiny_target: Target) -> None:
    with pytest.raises(InputError, match=r"^backend\.python: .* has no vllm"):
        VllmBackend(tiny_target, python=sys.executable).describe()
    with pytest.raises(InputError, match=r"^backend\.python: .* is not a Python interpreter"):
        VllmBackend(tiny_target, python="nowhere").supports("retrieval")


def test_a_command_serves_the_target_in_its_data_type(tiny_target: Target, tiny_folder: Path) -> None:
    backend = VllmBackend(tiny_target, python="py", args=["--max-model-len", 256])
    backend._installed = {"versions": {"vllm": "0.32.0"}}
    command = backend.command(SpeculativeConfig("prompt_lookup", 2), 8123)
    assert command[0] == "py" and str(tiny_folder.resolve()) in command
    assert json.loads(command[command.index("--speculative-config") + 1])["method"] == "ngram"
    for option, value in {"--dtype": "float32", "--port": "8123", "--max-model-len": "256"}.items():
        assert command[command.index(option) + 1] == value
    assert "--speculative-config" not in backend.command(SpeculativeConfig(), 8123)


def test_a_space_has_nothing_that_vllm_lacks(tiny_target: Target) -> None:
    backend = VllmBackend(tiny_target)
    space = SearchSpace(
        3, kinds=["none", "prompt_lookup", "draft_model"], protect_first=0, protect_last=0, drafts=["a", "b"]
    )
    found = backend.restrict(space)
    assert (found.stops, found.matches, found.allow_lossy) == (("length",), ("first",), False)
    assert backend.restrict(found) == found


def test_a_model_from_a_gguf_file_is_saved_once_and_computes_the_same(smollm2: Target, tmp_path: Path) -> None:
    from searches.backends.served_model import served_folder

    folder = Path(served_folder(smollm2, tmp_path))
    assert folder.parent == tmp_path and "quantization_config" not in json.loads((folder / "config.json").read_text())
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert served_folder(smollm2, tmp_path) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    again = load_target(str(folder), dtype="float32", device=str(smollm2.device))
    assert again.weights_sample == smollm2.weights_sample and again.tokenizer_digest == smollm2.tokenizer_digest


@pytest.mark.skipif(_PYTHON is None, reason="LAYERSKIP_VLLM_PYTHON names no interpreter with vllm")
class TestRealEngine:
    """One study's worth of a real engine; each start takes tens of seconds."""

    @pytest.fixture(scope="class")
    def target(self, tmp_path_factory: pytest.TempPathFactory) -> Target:
        """A tiny model whose heads are as wide as vLLM's attention on a CPU needs."""
        sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
        folder = save_tiny(tmp_path_factory.mktemp("real") / "llama", idle=(1,), **sizes)
        return load_target(str(folder), dtype="float32", device="cpu")

    @pytest.fixture(scope="class")
    def backend(self, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmBackend]:
        backend = VllmBackend(
            target, python=_PYTHON, args=["--max-model-len", "512"], folder=str(tmp_path_factory.mktemp("served"))
        )
        yield backend
        backend.close()

    @pytest.fixture(scope="class")
    def prompts(self) -> PromptSet:
        return PromptSet.of([f"the cat and the cat {place}" for place in range(3)])

    @pytest.mark.parametrize("kind", ["prompt_lookup", "draft_model"])
    def test_greedy_outputs_are_those_of_plain_decoding(
        self, backend: VllmBackend, target: Target, prompts: PromptSet, kind: str, tmp_path: Path
    ) -> None:
        config = SpeculativeConfig("prompt_lookup", 3, match="first")
        if kind == "draft_model":
            draft = save_draft_checkpoint(target, SkipMask.of(target.layers, {1}, {1}), tmp_path / "draft")
            config = SpeculativeConfig("draft_model", 2, draft=str(draft))
        measured = backend.measure(config, prompts, Task(max_new_tokens=24))
        assert measured.lossless.verdict == "exact"
        assert measured.to_dict()["acceptance_rate"] > 0
        assert all(sample.tokens == 24 for sample in (*measured.baseline, *measured.candidate))

    def test_several_requests_give_figures_under_load(self, backend: VllmBackend, prompts: PromptSet) -> None:
        rows = list(backend.compare({"two": SpeculativeConfig("prompt_lookup", 3, match="first")}, prompts, Task(), Load(3)))
        assert len(rows) == 3
        assert backend.figures()["throughput"] > 0 and backend.figures()["baseline_tpot_p95"] > 0

    def test_a_configuration_that_vllm_refuses_is_an_error_with_its_log(
        self, backend: VllmBackend, prompts: PromptSet
    ) -> None:
        with pytest.raises(BackendError) as error:
            backend.measure(SpeculativeConfig("prompt_lookup", 100000), prompts, Task(max_new_tokens=4))
        assert "exit code" in error.value.reason and error.value.log_tail

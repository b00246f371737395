"""Trained heads in the layouts of engines: names, shapes, and outputs that an independent computation gets from them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

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
from tests.tiny import VOCABULARY, save_tiny

LENGTH = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = save_tiny(tmp_path_factory.mktemp("target"), num_hidden_layers=4)
    return load_target(str(folder), dtype="float32", device="cpu")


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


def _as_vllm_computes(folder: Path, tokens: Tensor, features: Tensor) -> Tensor:
    """The forward pass of vLLM's EagleLlamaForCausalLM, from its names: own embeddings, no bias, no first norm."""
    config, weights = AutoConfig.from_pretrained(folder), load_file(folder / "model.safetensors")
    assert isinstance(config, LlamaConfig)
    config._attn_implementation = "eager"
    layer: Any = LlamaDecoderLayer(config, 0)
    layer.input_layernorm = nn.Identity()
    own = {name.removeprefix("layers.0."): part for name, part in weights.items() if name.startswith("layers.0.")}
    layer.load_state_dict(own)
    assert set(weights) - {f"layers.0.{name}" for name in own} == {"fc.weight", "embed_tokens.weight"}
    embedded = weights["embed_tokens.weight"][tokens]
    hidden = nn.functional.linear(torch.cat((embedded, features), -1), weights["fc.weight"])
    positions = torch.arange(LENGTH)[None]
    causal = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]
    rotary = LlamaRotaryEmbedding(config)(hidden, positions)
    output = layer(hidden, attention_mask=causal, position_ids=positions, position_embeddings=rotary)
    return output[0] if isinstance(output, tuple) else output


@torch.inference_mode()
def test_an_eagle_head_computes_the_same_from_vllms_layout(target: Target, tmp_path: Path) -> None:
    head = _eagle(target, tmp_path / "head")
    tokens, features = _states(target)
    expected = head(target.model.get_input_embeddings()(tokens), features)
    folder = save_portable(tmp_path / "head", tmp_path / "vllm", target)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert torch.allclose(_as_vllm_computes(folder, tokens, features), expected, atol=1e-4)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLM"], "llama")
    assert (config["vocab_size"], config["hidden_size"], config["num_hidden_layers"]) == (VOCABULARY, target.hidden, 1)


def _norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden * (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def _as_vllm_computes_eagle_3(folder: Path, embedded: Tensor, states: Tensor) -> Tensor:
    """The output of vLLM's Eagle3LlamaForCausalLM after its last norm, from its names, in plain torch."""
    layer = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    weights = load_file(folder / "model.safetensors")
    part = {name.removeprefix("layers.0."): tensor for name, tensor in weights.items() if name.startswith("layers.0.")}
    normed = _norm(embedded, part["input_layernorm.weight"]), _norm(states, part["hidden_norm.weight"])
    both = torch.cat(normed, -1)[0]
    half = layer["head_dim"] // 2
    angles = torch.arange(LENGTH)[:, None] * layer["rope_theta"] ** (-torch.arange(half) / half)
    cosine, sine = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def heads(name: str, count: int) -> Tensor:
        split = (both @ part[f"self_attn.{name}_proj.weight"].T).view(LENGTH, count, -1).transpose(0, 1)
        if name != "v":
            split = split * cosine + torch.cat((-split[..., half:], split[..., :half]), -1) * sine
        return split.repeat_interleave(layer["num_attention_heads"] // count, 0)

    query, key, value = heads("q", layer["num_attention_heads"]), *(heads(n, layer["num_key_value_heads"]) for n in "kv")
    scores = query @ key.transpose(1, 2) / math.sqrt(layer["head_dim"]) + torch.full((LENGTH, LENGTH), -math.inf).triu(1)
    attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(LENGTH, -1)
    after = states[0] + attended @ part["self_attn.o_proj.weight"].T
    given = _norm(after, part["post_attention_layernorm.weight"])
    gate, up = (given @ part[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return _norm(after + (silu(gate) * up) @ part["mlp.down_proj.weight"].T, weights["norm.weight"])


@pytest.mark.parametrize("vocabulary", [None, 40])
@torch.inference_mode()
def test_a_head_in_eagle_3s_form_computes_the_same_from_vllms_layout(
    target: Target, vocabulary: int | None, tmp_path: Path
) -> None:
    """Two tokens in a row: from three layers of the target, then from its own states."""
    drafted = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))[: vocabulary or VOCABULARY]
    few = {} if vocabulary is None else {"tokens": drafted, "vocabulary": vocabulary}
    head = _eagle(target, tmp_path / "head", three_layers=True, **few)
    tokens = _states(target)[0]
    text = tuple(tokens[0].tolist())
    embedded = target.model.get_input_embeddings()(tokens)
    layers = target.model(tokens, output_hidden_states=True).hidden_states
    folder = save_portable(tmp_path / "head", tmp_path / "vllm", target)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    # hidden_states[i] is what layer i reads, as in vLLM
    read = torch.cat([layers[index] for index in config["eagle_aux_hidden_state_layer_ids"][:2]], -1)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4] and target.layers == 4
    features = torch.cat((read, read_features(target, text, ("model.layers.3",))[None]), -1)
    assert torch.allclose(features[0], read_features(target, text, head.shape.modules), atol=1e-5)
    expected, ours = features @ weights["fc.weight"].T, head.fuse(features)
    for _ in range(2):
        expected, ours = _as_vllm_computes_eagle_3(folder, embedded, expected)[None], head(embedded, ours)
        assert torch.allclose(expected, ours, atol=1e-4)
    logits = ours[0, -1] @ weights["lm_head.weight"].T
    assert torch.allclose(logits, Readout(target, head.tokens)(ours)[0, -1], atol=1e-4)
    assert config["draft_vocab_size"] == len(logits) == len(drafted)
    assert (config["norm_output"], config["norm_before_residual"]) == (True, False)
    assert "embed_tokens.weight" not in weights  # the target's own
    if vocabulary is not None:
        assert torch.equal(weights["d2t"] + torch.arange(vocabulary), drafted)
        assert weights["t2d"].nonzero()[:, 0].tolist() == sorted(drafted.tolist())
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
    source = save_tiny(tmp_path / "gemma", "gemma3_text", num_hidden_layers=4)
    scaled = load_target(str(source), dtype="float32", device="cpu")
    _eagle(scaled, tmp_path / "head", three_layers=True)
    folder = save_portable(tmp_path / "head", tmp_path / "vllm", scaled)
    stored = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    table = scaled.model.get_input_embeddings().weight
    assert torch.allclose(stored, table * scaled.hidden**0.5, rtol=1e-2) and not torch.equal(stored, table)


@torch.inference_mode()
def test_an_eagle_head_computes_the_same_from_sglangs_layout(target: Target, tmp_path: Path) -> None:
    """SGLang's layout is that of EAGLE's authors with a bias, which this library loads."""
    head = _eagle(target, tmp_path / "head")
    tokens, features = _states(target)
    embedded = target.model.get_input_embeddings()(tokens)
    folder = save_portable(tmp_path / "head", tmp_path / "sglang", target, "sglang")
    assert torch.allclose(load_eagle(folder, target)(embedded, features), head(embedded, features), atol=1e-5)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle"]
    assert "embed_tokens.weight" not in load_file(folder / "model.safetensors")


@pytest.mark.parametrize("vocabulary", [None, 40])
@torch.inference_mode()
def test_medusa_heads_have_the_same_logits_in_vllms_layout(target: Target, vocabulary: int | None, tmp_path: Path) -> None:
    tokens = (
        None if vocabulary is None else torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))[:vocabulary]
    )
    heads = MedusaHeads(MedusaShape(target.hidden, 2, read_modules(target), vocabulary), tokens)
    for name, weight in heads.named_parameters():
        nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    save_trained(tmp_path / "head", "medusa", heads.shape.to_dict(), dict(heads.state_dict()), target, {})
    folder = save_portable(tmp_path / "head", tmp_path / "vllm", target)
    stored = load_file(folder / "model.safetensors")
    _, features = _states(target)
    hidden = features[0, -1]
    expected = Readout(target, tokens)(heads(hidden[None])[0])
    for index in range(2):
        block = f"blocks.{index}.layers.0"
        moved = hidden + silu(stored[f"{block}.weight"] @ hidden + stored[f"{block}.bias"])
        assert torch.allclose(stored["lm_head.weight"] @ moved, expected[index], atol=1e-4)
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_heads"], config["truncated_vocab_size"]) == (2, vocabulary or VOCABULARY)
    assert (config["medusa_fc_bias"], config["original_lm_head"]) == (True, True)
    assert ("token_map" in stored) == (tokens is not None)
    if tokens is not None:
        assert torch.equal(stored["token_map"], tokens)
    for head in (tmp_path / "head", folder):
        config = SpeculativeConfig("medusa", 6, head=str(head))
        assert describe_engines(deployment(config))["vllm"]["arguments"]["num_speculative_tokens"] == 2


_EARLIER = {"modules": ("model.layers.0", "model.layers.2", "model.layers.3")}  # a linear map joins embedding and state


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

"""Tests EAGLE heads in their authors' layout: loading, matching with a target, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from layerskip.config import ConfigError
from layerskip.heads.eagle import KIND, EagleHead, EagleShape, load_eagle
from layerskip.models.loading import load_target
from layerskip.models.target import Target
from layerskip.models.trained_module import save_trained
from tests.accelerator import DEVICE


@pytest.fixture
def embeddings(tiny_target: Target) -> Tensor:
    return tiny_target.model.get_input_embeddings().weight.detach().clone()


def _head(target: Target, attention_bias: bool = False) -> EagleHead:
    torch.manual_seed(1)
    plain = EagleShape.of(target)
    head = EagleHead(EagleShape(**plain.to_dict() | {"attention_bias": attention_bias})).eval()
    for name, weight in head.named_parameters():
        if "self_attn" in name:  # zero weights would hide lost tensors
            torch.nn.init.normal_(weight, std=0.3)
    return head


def _publish(
    folder: Path, head: EagleHead, embeddings: Tensor | None, file: str = "model.safetensors", **changes: Any
) -> Path:
    """Save a head as EAGLE-1's own code does: a one-layer Llama configuration, and weights with the target's embeddings."""
    shape, weights = head.shape, {name.removeprefix("body."): tensor for name, tensor in head.weights().items()}
    folder.mkdir(exist_ok=True)
    save = save_file if file.endswith("safetensors") else torch.save
    save(weights | ({} if embeddings is None else {"embed_tokens.weight": embeddings}), folder / file)
    fields = {"hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_attention_heads": shape.heads}
    fields |= {"num_key_value_heads": shape.key_value_heads, "num_hidden_layers": 1, "rms_norm_eps": 1e-5}
    fields |= {"head_dim": shape.head_dim} | changes
    (folder / "config.json").write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return folder


def norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden * (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def llama_layer(weights: dict[str, Tensor], shape: EagleShape, read: Tensor, residual: Tensor) -> Tensor:
    """A Llama layer in plain torch; its attention reads ``read`` as it is, and is added to ``residual``."""

    def linear(name: str, of: Tensor) -> Tensor:
        name = f"layers.0.{name}_proj"
        return torch.nn.functional.linear(of, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    n, width = read.shape[1], shape.head_dim
    angles = torch.outer(torch.arange(n), shape.rope_theta ** -(torch.arange(0, width, 2) / width))
    cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))

    def heads(name: str, count: int, turned: bool) -> Tensor:
        split = linear(f"self_attn.{name}", read).view(1, n, count, width).transpose(1, 2)
        half = torch.cat((-split[..., width // 2 :], split[..., : width // 2]), -1)
        return (split * cos + half * sin if turned else split).repeat_interleave(shape.heads // count, 1)

    query, key = heads("q", shape.heads, True), heads("k", shape.key_value_heads, True)
    value = heads("v", shape.key_value_heads, False)
    scores = query @ key.transpose(2, 3) / width**0.5 + torch.full((n, n), float("-inf")).triu(1)
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(1, n, shape.heads * width)
    after = residual + linear("self_attn.o", mixed)
    normed = norm(after, weights["layers.0.post_attention_layernorm.weight"])
    gated = torch.nn.functional.silu(linear("mlp.gate", normed)) * linear("mlp.up", normed)
    return after + linear("mlp.down", gated)


def eagle_reference(weights: dict[str, Tensor], shape: EagleShape, embedded: Tensor, states: Tensor) -> Tensor:
    """EAGLE-1's model (arXiv 2401.15077, section 4.1, and its authors' configuration).

    A linear map of embeddings and states, in this order, and one Llama layer with a norm before its MLP alone.
    """
    fused = torch.nn.functional.linear(torch.cat((embedded, states), -1), weights["fc.weight"], weights.get("fc.bias"))
    return llama_layer(weights, shape, fused, fused)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_published_head_equals_a_reference_implementation(
    tiny_target: Target, embeddings: Tensor, tmp_path: Path, file: str
) -> None:
    """Compares names, order of inputs and norms."""
    head = _head(tiny_target)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    folder = _publish(tmp_path, head, embeddings, file)
    embedded, states = torch.randn(2, 1, 6, head.shape.hidden).unbind(0)
    with torch.no_grad():
        found = load_eagle(folder, tiny_target)(embedded.to(DEVICE), states.to(DEVICE)).cpu()
    stored = torch.load(folder / file) if file.endswith("bin") else load_file(folder / file)
    assert torch.allclose(found, eagle_reference(stored, head.shape, embedded, states), rtol=1e-4, atol=1e-4)


def test_a_head_with_attention_biases_is_loaded_and_saved(tiny_target: Target, embeddings: Tensor, tmp_path: Path) -> None:
    """As published for Qwen2: queries, keys and values have biases, the output projection has none."""
    head = _head(tiny_target, attention_bias=True)
    biases = {name for name in head.weights() if "self_attn" in name and name.endswith("bias")}
    assert biases == {f"body.layers.0.self_attn.{name}_proj.bias" for name in "qkv"}
    loaded = load_eagle(_publish(tmp_path / "theirs", head, embeddings), tiny_target)
    save_trained(tmp_path / "ours", KIND, loaded.shape.to_dict(), loaded.weights(), tiny_target, {})
    states = torch.randn(1, 4, head.shape.hidden)
    for found in (loaded, load_eagle(tmp_path / "ours", tiny_target)):
        assert torch.equal(found(states, states), head(states, states))
    assert not torch.allclose(_head(tiny_target)(states, states), head(states, states))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_embeddings_match_those_of_the_target_up_to_rounding(
    tiny_target: Target, embeddings: Tensor, tmp_path: Path, stored: torch.dtype, dtype: str
) -> None:
    """A tuned model differs by more: one small optimiser step moved a tenth of the embeddings, as Vicuna's of Llama-2's."""
    embeddings[3] *= 1e-5  # where float16 has few bits
    same, head = Target(load_target(tiny_target.name, dtype="float32", device=DEVICE).model, name="same"), _head(tiny_target)
    same.model.get_input_embeddings().weight.data.copy_(embeddings)
    same.model.to(getattr(torch, dtype))
    for copy in (embeddings, embeddings.half(), embeddings.bfloat16()):
        assert load_eagle(_publish(tmp_path, head, copy.to(stored)), same).shape == head.shape
    moved = embeddings + 2e-5 * torch.randn(embeddings.shape).sign() * (torch.arange(len(embeddings)) % 10 == 0)[:, None]
    with pytest.raises(ConfigError, match=r"^head: [^\n]* made for another target: its embeddings are not those of same$"):
        load_eagle(_publish(tmp_path, head, moved.to(stored)), same)


def test_a_head_for_other_sizes_is_refused(tiny_target: Target, embeddings: Tensor, tmp_path: Path) -> None:
    head = _head(tiny_target)
    assert load_eagle(_publish(tmp_path / "without", head, None), tiny_target).shape == head.shape
    for number, (table, changes, reason) in enumerate(
        (
            (embeddings[:-3], {}, "its vocabulary"),
            (embeddings[:, :-3], {}, "its embeddings"),
            (embeddings, {"hidden_size": 64}, "it reads 64 elements per token"),
        )
    ):
        folder = _publish(tmp_path / str(number), head, table.clone(), **changes)
        with pytest.raises(ConfigError, match=f"^head: .* another target: {reason}"):
            load_eagle(folder, tiny_target)


def test_the_layout_of_eagle_3_is_refused_by_name(tiny_target: Target, embeddings: Tensor, tmp_path: Path) -> None:
    folder = _publish(tmp_path, _head(tiny_target), embeddings)
    save_file(load_file(folder / "model.safetensors") | {"d2t": torch.arange(4)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"^head: [^\n]* EAGLE-3's authors, which is not supported"):
        load_eagle(folder, tiny_target)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0, "head_dim": None},
        {"num_attention_heads": None},
        {"hidden_size": "wide"},
        {"intermediate_size": float("inf")},
        {"rope_scaling": "linear"},
    ],
    ids=str,
)
def test_a_damaged_configuration_is_refused(
    tiny_target: Target, embeddings: Tensor, tmp_path: Path, change: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=rf"^head: {tmp_path} is damaged: [^\n]*$"):
        load_eagle(_publish(tmp_path, _head(tiny_target), embeddings, **change), tiny_target)


class _Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("harmed"),)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "held", [{"fc.weight": _Harmful()}, {"fc.weight": 3}, [3], None], ids=["code", "int", "list", "half"]
)
def test_a_pickle_of_anything_but_tensors_is_refused(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: object
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "pytorch_model.bin"
    torch.save(held or {"fc.weight": torch.zeros(3)}, file)
    if held is None:
        file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ConfigError, match="^head: cannot read .*tensors alone"):
        load_eagle(tmp_path, tiny_target)
    assert not (tmp_path / "harmed").exists()

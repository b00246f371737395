"""EAGLE heads in the layouts of their authors and of engines: loading, matching with a target, outputs, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from layerskip.config import ConfigError, SpeculativeConfig
from layerskip.decoding.decode import Stops, decode
from layerskip.decoding.sampling import Sampling
from layerskip.drafters.registry import build_drafter
from layerskip.engines.registry import describe_engines
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.heads.folders import load_eagle, save_portable, why_not_portable
from layerskip.models.loading import load_target
from layerskip.models.target import Target
from layerskip.models.trained_module import save_trained
from tests.accelerator import DEVICE
from tests.drafters.recorder import Recorder
from tests.engines.known import deployment
from tests.tiny import VOCABULARY, save_tiny


@pytest.fixture
def embeddings(tiny_target: Target) -> Tensor:
    return tiny_target.model.get_input_embeddings().weight.detach().clone()


def random_head(target: Target, **changes: Any) -> EagleHead:
    torch.manual_seed(1)
    head = EagleHead(replace(EagleShape.of(target), **changes)).eval()
    for weight in head.parameters():  # zeros and ones would hide lost tensors
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
    fields |= {"num_key_value_heads": shape.key_value_heads, "num_hidden_layers": 1, "head_dim": shape.head_dim}
    fields |= {"rms_norm_eps": shape.rms_norm_eps, "rope_theta": shape.rope_theta} | changes
    (folder / "config.json").write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return folder


def eagle_reference(weights: dict[str, Tensor], shape: EagleShape, embedded: Tensor, states: Tensor) -> Tensor:
    """EAGLE-1's model in plain torch (arXiv 2401.15077, section 4.1, and its authors' configuration).

    A linear map of embeddings and states, in this order, and one Llama layer with a norm before its MLP alone.
    """

    def linear(name: str, of: Tensor) -> Tensor:
        name = f"layers.0.{name}_proj"
        return torch.nn.functional.linear(of, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    fused = torch.nn.functional.linear(torch.cat((embedded, states), -1), weights["fc.weight"], weights.get("fc.bias"))
    n, width = fused.shape[1], shape.head_dim
    angles = torch.outer(torch.arange(n), shape.rope_theta ** -(torch.arange(0, width, 2) / width))
    cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))

    def heads(name: str, count: int, turned: bool) -> Tensor:
        split = linear(f"self_attn.{name}", fused).view(1, n, count, width).transpose(1, 2)
        half = torch.cat((-split[..., width // 2 :], split[..., : width // 2]), -1)
        return (split * cos + half * sin if turned else split).repeat_interleave(shape.heads // count, 1)

    query, key = heads("q", shape.heads, True), heads("k", shape.key_value_heads, True)
    value = heads("v", shape.key_value_heads, False)
    scores = query @ key.transpose(2, 3) / width**0.5 + torch.full((n, n), float("-inf")).triu(1)
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(1, n, shape.heads * width)
    after = fused + linear("self_attn.o", mixed)
    normed = after * (after.square().mean(-1, keepdim=True) + shape.rms_norm_eps).rsqrt()
    normed = normed * weights["layers.0.post_attention_layernorm.weight"]
    return after + linear("mlp.down", torch.nn.functional.silu(linear("mlp.gate", normed)) * linear("mlp.up", normed))


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("model.safetensors", {}),
        ("pytorch_model.bin", {"bias": True, "rope_theta": 500_000.0}),
        ("model.safetensors", {"attention_bias": True, "rms_norm_eps": 1.0}),
    ],
)
def test_a_published_head_drafts_as_a_reference_implementation(
    tiny_target: Target, embeddings: Tensor, tmp_path: Path, file: str, changes: dict[str, Any]
) -> None:
    """Chains of three tokens after every round of a decoding. Those for Qwen2 have biases of queries, keys and values."""
    head = random_head(tiny_target, **changes)
    folder = _publish(tmp_path, head, embeddings, file)
    stored = torch.load(folder / file) if file.endswith("bin") else load_file(folder / file)
    biases = {f"layers.0.self_attn.{part}_proj.bias" for part in "qkv"} if "attention_bias" in changes else set()
    assert {name for name in stored if name.endswith("bias")} == biases | ({"fc.bias"} if "bias" in changes else set())
    stored = {name: tensor.to(DEVICE) for name, tensor in stored.items()}
    small = 0.01 * torch.randn(1, 4, head.shape.hidden, device=DEVICE)  # so that the norm's epsilon counts
    with torch.no_grad(), torch.device(DEVICE):
        torch.testing.assert_close(
            load_eagle(folder, tiny_target)(small, small), eagle_reference(stored, head.shape, small, small)
        )
    config = SpeculativeConfig("eagle", 3, head=str(folder), top_k=1)
    recorder = Recorder(build_drafter(config, tiny_target))
    prompt = (3, 40, 41, 7, 3, 9)
    result = decode(tiny_target, recorder, prompt, Sampling(), 12, stops=Stops(frozenset()))
    plain = tiny_target.model.generate(
        torch.tensor([prompt], device=DEVICE), do_sample=False, min_new_tokens=12, max_new_tokens=12
    )
    assert result.tokens == plain[0, len(prompt) :].tolist()
    model = tiny_target.model
    for context, branches in recorder.drafts:
        with torch.no_grad(), torch.device(DEVICE):
            known = torch.tensor([context])
            states = model.model(known[:, :-1]).last_hidden_state
            for _ in branches:
                found = eagle_reference(stored, head.shape, embeddings[known[:, 1:]], states)
                known = torch.cat((known, model.lm_head(found[:, -1:]).argmax(-1)), 1)
                states = torch.cat((states, found[:, -1:]), 1)
        assert branches[-1:] == ([tuple(known[0, len(context) :].tolist())] if branches else [])


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_embeddings_match_those_of_the_target_up_to_rounding(
    tiny_target: Target, embeddings: Tensor, tmp_path: Path, stored: torch.dtype, dtype: str
) -> None:
    """A tuned model differs by more: one small optimiser step moved a tenth of the embeddings, as Vicuna's of Llama-2's."""
    embeddings[3] *= 1e-5  # where float16 has few bits
    same = Target(load_target(tiny_target.name, dtype="float32", device=DEVICE).model, name="same")
    head = random_head(tiny_target)
    same.model.get_input_embeddings().weight.data.copy_(embeddings)
    same.model.to(getattr(torch, dtype))
    for copy in (embeddings, embeddings.half(), embeddings.bfloat16()):
        assert load_eagle(_publish(tmp_path, head, copy.to(stored)), same).shape == head.shape
    moved = embeddings + 2e-5 * torch.randn(embeddings.shape).sign() * (torch.arange(len(embeddings)) % 10 == 0)[:, None]
    with pytest.raises(ConfigError, match=r"^head: [^\n]* made for another target: its embeddings are not those of same$"):
        load_eagle(_publish(tmp_path, head, moved.to(stored)), same)


def test_a_head_for_other_sizes_is_refused(tiny_target: Target, embeddings: Tensor, tmp_path: Path) -> None:
    head = random_head(tiny_target)
    assert load_eagle(_publish(tmp_path / "without", head, None), tiny_target).shape == head.shape
    for number, (table, changes, reason) in enumerate(
        (
            (embeddings[:-3], {}, "its embeddings"),
            (embeddings[:, :-3], {}, "its embeddings"),
            (embeddings, {"hidden_size": 64}, "it reads 64 elements per token"),
        )
    ):
        folder = _publish(tmp_path / str(number), head, table.clone(), **changes)
        with pytest.raises(ConfigError, match=f"^head: .* another target: {reason}"):
            load_eagle(folder, tiny_target)
    folder = _publish(tmp_path / "scaled", head, None, rope_scaling={"type": "linear", "factor": 4.0})
    with pytest.raises(ConfigError, match="^head: its positions are scaled by 'linear', which is not supported"):
        load_eagle(folder, tiny_target)


@pytest.mark.parametrize("named", [True, False])
def test_the_layout_of_eagle_3_is_refused_by_name(
    tiny_target: Target, embeddings: Tensor, tmp_path: Path, named: bool
) -> None:
    fields = {"architectures": ["LlamaEagle3"]} if named else {}
    folder = _publish(tmp_path, random_head(tiny_target), embeddings, **fields)
    if not named:
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
        {"rope_theta": float("nan")},
    ],
    ids=str,
)
def test_a_damaged_configuration_is_refused(
    tiny_target: Target, embeddings: Tensor, tmp_path: Path, change: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=rf"^head: {tmp_path} is damaged: [^\n]*$"):
        load_eagle(_publish(tmp_path, random_head(tiny_target), embeddings, **change), tiny_target)


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


def _saved_head(target: Target, folder: Path, **changes: Any) -> EagleHead:
    head = random_head(target, **changes)
    save_trained(folder, head.shape.to_dict(), head.weights(), target, {})
    return head


@torch.inference_mode()
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_eagle_head_computes_the_same_from_an_engines_layout(tiny_target: Target, tmp_path: Path, engine: str) -> None:
    """vLLM's has embeddings of its own and no bias, SGLang's the target's embeddings and a bias."""
    head = _saved_head(tiny_target, tmp_path / "head")
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
    _saved_head(scaled, tmp_path / "head")
    folder = save_portable(tmp_path / "head", tmp_path / "vllm", scaled)
    stored = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    table = scaled.model.get_input_embeddings().weight
    assert torch.allclose(stored, table * scaled.hidden**0.5, rtol=1e-2) and not torch.equal(stored, table)


def test_heads_that_engines_do_not_load_are_refused_with_the_reason(tiny_target: Target, tmp_path: Path) -> None:
    _saved_head(tiny_target, tmp_path / "looking", lookback=2)
    with pytest.raises(ConfigError, match="^head: .*lookback=0"):
        save_portable(tmp_path / "looking", tmp_path / "vllm", tiny_target)
    assert not (tmp_path / "vllm").exists()
    config = SpeculativeConfig("eagle", 3, head=str(tmp_path / "looking"), top_k=1)
    assert "lookback=0" in describe_engines(deployment(config))["vllm"]["reason"]
    _saved_head(tiny_target, tmp_path / "head")
    folder = save_portable(tmp_path / "head", tmp_path / "sglang", tiny_target, "sglang")
    with pytest.raises(ConfigError, match="^head: .*authors' layout already"):
        save_portable(folder, tmp_path / "again", tiny_target)
    with pytest.raises(ConfigError, match="^engine: llama_cpp"):
        save_portable(tmp_path / "head", tmp_path / "other", tiny_target, "llama_cpp")
    assert why_not_portable(folder) is None
    assert "cannot read" in str(why_not_portable(tmp_path / "absent"))


def test_commands_name_the_folder_of_a_head_and_its_layout(tiny_target: Target, tmp_path: Path) -> None:
    _saved_head(tiny_target, tmp_path / "head")
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

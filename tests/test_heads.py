"""Heads on disk: who they belong to, what is refused, and those in their authors' published layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from layerskip.config import ConfigError, SpeculativeConfig
from layerskip.decode import decode
from layerskip.drafters.build import build_drafter
from layerskip.eagle import KIND, EagleHead, EagleShape, load_eagle
from layerskip.heads import save_head
from layerskip.medusa import MedusaHeads, MedusaShape, load_medusa
from layerskip.readout import Readout, choose_tokens
from layerskip.target import Target, load_target
from tests.drafters.contract import GREEDY, target_of
from tests.families import build
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(str(save_tiny(tmp_path_factory.mktemp("target"))), dtype="float32", device="cpu")


@pytest.fixture
def head(target: Target) -> EagleHead:
    torch.manual_seed(0)
    return EagleHead(EagleShape.of(target, vocabulary=40), torch.arange(60, 100))


@pytest.fixture
def folder(target: Target, head: EagleHead, tmp_path: Path) -> Path:
    save_head(tmp_path / "head", KIND, head.shape.to_dict(), head.weights(), target, {"steps": 0})
    return tmp_path / "head"


def test_a_head_comes_back_as_it_was(target: Target, head: EagleHead, folder: Path) -> None:
    loaded = load_eagle(folder, target)
    assert loaded.shape == head.shape
    states = torch.randn(1, 5, head.shape.hidden)
    assert torch.equal(loaded(states, states), head.eval()(states, states))
    assert loaded.tokens.tolist() == list(range(60, 100))


def test_a_head_serves_its_target_in_any_dtype(target: Target, folder: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        same = load_target(target.name, dtype=dtype, device="cpu")
        assert load_eagle(folder, same).fc.weight.dtype == getattr(torch, dtype)


def test_a_head_for_another_target_is_refused(folder: Path, tmp_path: Path) -> None:
    other = load_target(str(save_tiny(tmp_path / "other", seed=5)), dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match="^head: .* made for another target"):
        load_eagle(folder, other)
    with pytest.raises(ConfigError, match="^head: .* made for another target"):
        load_eagle(folder, target_of("gemma3_text"))


def test_a_head_of_another_kind_is_refused(target: Target, folder: Path) -> None:
    with pytest.raises(ConfigError, match="^head: .* is for eagle, not for medusa"):
        load_medusa(folder, target)


@pytest.mark.parametrize("harm", ["no folder", "no weights", "half the weights", "not json", "other schema", "lost tensor"])
def test_a_damaged_head_is_refused(target: Target, head: EagleHead, folder: Path, harm: str) -> None:
    weights, about = folder / "head.safetensors", folder / "head.json"
    if harm == "no folder":
        folder = folder / "nothing"
    elif harm == "no weights":
        weights.unlink()
    elif harm == "half the weights":
        weights.write_bytes(weights.read_bytes()[:200])
    elif harm == "not json":
        about.write_text("{")
    elif harm == "other schema":
        about.write_text(json.dumps(json.loads(about.read_text()) | {"schema": "other/1"}))
    else:
        save_file({k: v for k, v in head.weights().items() if k != "fc.weight"}, weights)
    with pytest.raises(ConfigError, match="^head: "):
        load_eagle(folder, target)


def test_a_damaged_medusa_head_is_refused(target: Target, tmp_path: Path) -> None:
    heads = MedusaHeads(MedusaShape(32, 2, ("model",)))
    weights = dict(heads.state_dict())
    save_head(tmp_path / "whole", "medusa", heads.shape.to_dict(), weights, target, {})
    assert len(load_medusa(tmp_path / "whole", target).blocks) == 2
    weights.pop("blocks.1.bias")
    save_head(tmp_path / "half", "medusa", heads.shape.to_dict(), weights, target, {})
    with pytest.raises(ConfigError, match="^head: .* is damaged"):
        load_medusa(tmp_path / "half", target)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_configuration_names_a_head(target: Target, folder: Path, tmp_path: Path, kind: str) -> None:
    if kind == "medusa":
        heads = MedusaHeads(MedusaShape(32, 2, ("model",)))
        folder = tmp_path / "medusa"
        save_head(folder, kind, heads.shape.to_dict(), dict(heads.state_dict()), target, {})
    config = SpeculativeConfig.from_dict({"kind": kind, "head": str(folder), "draft_length": 2})
    assert SpeculativeConfig.from_dict(config.to_dict()) == config
    prompt = target.encode("Hello")
    plain = decode(target, build_drafter(SpeculativeConfig(), target), prompt, GREEDY, 12)
    result = decode(target, build_drafter(config, target), prompt, GREEDY, 12)
    assert result.tokens == plain.tokens
    assert result.stats.drafted > 0


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_head_in_its_authors_layout_is_taken(target: Target, tmp_path: Path, file: str) -> None:
    """As EAGLE-1's own code saves it: a Llama configuration of one layer, the target's embeddings beside the weights."""
    torch.manual_seed(1)
    shape = EagleShape.of(target)
    head = EagleHead(shape).eval()
    embeddings = target.model.get_input_embeddings().weight.detach().clone()
    weights = {name.removeprefix("body."): tensor.contiguous() for name, tensor in head.weights().items()}
    assert {"fc.weight", "fc.bias", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight"} < set(weights)
    assert "layers.0.post_attention_layernorm.weight" in weights
    assert "layers.0.input_layernorm.weight" not in weights
    save = save_file if file.endswith("safetensors") else torch.save
    save(weights | {"embed_tokens.weight": embeddings}, tmp_path / file)
    fields = {"hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_attention_heads": shape.heads}
    fields |= {"num_key_value_heads": shape.key_value_heads, "num_hidden_layers": 1, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"head_dim": shape.head_dim}))
    loaded = load_eagle(tmp_path, target)
    states = torch.randn(1, 4, shape.hidden)
    assert torch.equal(loaded(states, states), head(states, states))
    save(weights | {"embed_tokens.weight": embeddings[:-3].clone()}, tmp_path / file)
    with pytest.raises(ConfigError, match="^head: .* another target: its vocabulary"):
        load_eagle(tmp_path, target)


class _Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("harmed"),)  # type: ignore[return-value]


@pytest.mark.parametrize("harm", ["code", "nothing", "half"])
def test_a_pickled_head_is_refused_unless_it_is_tensors(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    monkeypatch.chdir(tmp_path)
    fields = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    file = tmp_path / "pytorch_model.bin"
    torch.save({"fc.weight": _Harmful() if harm == "code" else torch.zeros(3)}, file)
    if harm != "code":
        file.write_bytes(file.read_bytes()[: 0 if harm == "nothing" else 200])
    with pytest.raises(ConfigError, match="^head: cannot read .*tensors alone"):
        load_eagle(tmp_path, target)
    assert not (tmp_path / "harmed").exists()


def test_drafted_tokens_are_the_commonest_and_those_that_end() -> None:
    counts = torch.tensor([5, 0, 9, 1, 7, 0])
    assert choose_tokens(counts, 3, [1]).tolist() == [1, 2, 4]
    assert choose_tokens(counts, 99, []).tolist() == list(range(6))
    assert choose_tokens(torch.zeros(5000), 3, [7]).tolist() == [0, 1, 7]


@pytest.mark.parametrize("family", ["cohere", "gemma2", "granite", "llama"])
def test_a_readout_is_the_targets_own_output_layer(family: str) -> None:
    """Some families scale or cap what it says."""
    model = build(family)
    target, tokens = Target(model), torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        hidden = model.base_model(input_ids=tokens).last_hidden_state
        assert torch.allclose(Readout(target, None)(hidden), model(input_ids=tokens).logits, atol=1e-5)


def test_tokens_that_are_not_drafted_from_have_no_chance(target: Target) -> None:
    chosen = torch.tensor([3, 8, 50])
    part, whole = Readout(target, chosen), Readout(target, None)
    hidden = torch.randn(2, 32)
    wide = part.spread(part(hidden))
    assert torch.allclose(wide[:, chosen], whole(hidden)[:, chosen], atol=1e-6)
    assert torch.isinf(wide).sum() == 2 * (target.vocabulary - 3)
    assert [part.token(place) for place in range(3)] == [3, 8, 50]

"""Tests saved heads: which target they belong to, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from layerskip.config import ConfigError
from layerskip.heads.eagle import KIND, EagleHead, EagleShape, load_eagle
from layerskip.heads.medusa import MedusaHeads, MedusaShape, load_medusa
from layerskip.heads.readout import Readout, choose_tokens
from layerskip.models.loading import load_target
from layerskip.models.target import Target
from layerskip.models.trained_module import save_trained
from tests.accelerator import DEVICE
from tests.drafters.contract import target_of
from tests.families import build
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(str(save_tiny(tmp_path_factory.mktemp("target"))), dtype="float32", device=DEVICE)


@pytest.fixture
def head(target: Target) -> EagleHead:
    torch.manual_seed(0)
    return EagleHead(EagleShape.of(target, vocabulary=40), torch.arange(60, 100)).to(DEVICE)


@pytest.fixture
def folder(target: Target, head: EagleHead, tmp_path: Path) -> Path:
    save_trained(tmp_path / "head", KIND, head.shape.to_dict(), head.weights(), target, {"steps": 0})
    return tmp_path / "head"


def test_a_loaded_head_equals_the_saved_one(target: Target, head: EagleHead, folder: Path) -> None:
    loaded = load_eagle(folder, target)
    assert loaded.shape == head.shape
    states = torch.randn(1, 5, head.shape.hidden, device=DEVICE)
    assert torch.equal(loaded(states, states), head.eval()(states, states))
    assert loaded.tokens.tolist() == list(range(60, 100))


def test_a_head_serves_its_target_in_any_dtype(target: Target, head: EagleHead, folder: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        same = load_target(target.name, dtype=dtype, device=DEVICE)
        loaded = load_eagle(folder, same)
        assert loaded.fc.weight.dtype == getattr(torch, dtype)
        assert torch.equal(
            loaded.body.rotary_emb.inv_freq, head.body.rotary_emb.inv_freq
        )  # reduced precision would move distant positions


def test_a_head_for_another_target_or_of_another_kind_is_refused(target: Target, folder: Path, tmp_path: Path) -> None:
    other = load_target(str(save_tiny(tmp_path / "other", seed=5)), dtype="float32", device=DEVICE)
    with pytest.raises(ConfigError, match="^head: .* made for another target"):
        load_eagle(folder, other)
    with pytest.raises(ConfigError, match="^head: .* made for another target"):
        load_eagle(folder, target_of("gemma3_text"))
    with pytest.raises(ConfigError, match="^head: .* is for eagle, not for medusa"):
        load_medusa(folder, target)


@pytest.mark.parametrize("harm", ["no folder", "no weights", "half the weights", "not json", "other schema"])
def test_an_unreadable_head_is_refused(target: Target, folder: Path, harm: str) -> None:
    weights, about = folder / "head.safetensors", folder / "head.json"
    if harm == "no folder":
        folder = folder / "nothing"
    elif harm == "no weights":
        weights.unlink()
    elif harm == "half the weights":
        weights.write_bytes(weights.read_bytes()[:200])
    elif harm == "not json":
        about.write_text("{")
    else:
        about.write_text(json.dumps(json.loads(about.read_text()) | {"schema": "other/1"}))
    with pytest.raises(ConfigError, match="^head: "):
        load_eagle(folder, target)


MISSING = "missing"


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("shape", MISSING),
        ("shape", None),
        ("shape", {"heads": 0}),
        ("shape", {"key_value_heads": 3}),
        ("shape", {"intermediate": "wide"}),
        ("shape", {"vocabulary": 41}),
        ("shape", {"lookback": -1}),
        ("shape", {"side_by_side": 1}),
        ("shape", {"modules": ["model.layers.99"]}),
        ("shape", {"colour": "red"}),
        ("target", MISSING),
        ("target", None),
        ("target", {"weights": ["x"]}),
    ],
)
def test_a_head_with_damaged_metadata_is_refused(target: Target, folder: Path, part: str, value: object) -> None:
    about = json.loads((folder / "head.json").read_text())
    if value == MISSING:
        del about[part]
    else:
        about[part] = about[part] | value if isinstance(value, dict) and value else value
    (folder / "head.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match=rf"^head: {folder} is damaged: [^\n]*$"):
        load_eagle(folder, target)


@pytest.mark.parametrize(
    "change",
    [
        {"fc.weight": None},
        {"tokens": torch.arange(1000, 1040)},
        {"tokens": torch.arange(40) // 2},
        {"tokens": torch.linspace(0.1, 0.9, 40)},
        {"fc.bias": torch.linspace(0.1, 0.9, 3)},
        {"further": torch.linspace(0.1, 0.9, 3)},
    ],
    ids=str,
)
def test_a_head_with_damaged_weights_is_refused(
    target: Target, head: EagleHead, folder: Path, change: dict[str, torch.Tensor | None]
) -> None:
    kept = {name: tensor for name, tensor in (head.weights() | change).items() if tensor is not None}
    save_file(kept, folder / "head.safetensors")
    with pytest.raises(ConfigError, match=rf"^head: {folder} is damaged: [^\n]*$"):
        load_eagle(folder, target)


@pytest.mark.parametrize("change", [{}, {"modules": []}, {"modules": ["model.layers.99"]}, {"heads": 0}])
def test_a_damaged_medusa_head_is_refused(target: Target, tmp_path: Path, change: dict[str, object]) -> None:
    heads = MedusaHeads(MedusaShape(32, 2, ("model",)))
    weights = dict(heads.state_dict())
    save_trained(tmp_path, "medusa", heads.shape.to_dict(), weights, target, {})
    assert len(load_medusa(tmp_path, target).blocks) == 2
    if not change:
        del weights["blocks.1.bias"]
    save_trained(tmp_path, "medusa", heads.shape.to_dict() | change, weights, target, {})
    with pytest.raises(ConfigError, match=rf"^head: {tmp_path} is damaged: [^\n]*$"):
        load_medusa(tmp_path, target)


def test_the_most_common_tokens_and_the_required_ones_are_chosen() -> None:
    counts = torch.tensor([5, 0, 9, 1, 7, 0])
    assert choose_tokens(counts, 3, [1]).tolist() == [1, 2, 4]
    assert choose_tokens(counts, 99, []).tolist() == list(range(6))
    assert choose_tokens(torch.zeros(5000), 3, [7]).tolist() == [0, 1, 7]


@pytest.mark.parametrize("family", ["cohere", "gemma2", "granite", "llama"])
def test_a_readout_equals_the_targets_output_layer(family: str) -> None:
    """Some families scale or cap their logits."""
    model = build(family)
    target, tokens = Target(model), torch.tensor([[3, 4, 5, 6]], device=DEVICE)
    with torch.no_grad():
        hidden = model.base_model(input_ids=tokens).last_hidden_state
        assert torch.allclose(Readout(target, None)(hidden), model(input_ids=tokens).logits, atol=1e-5)


def test_a_readout_over_some_tokens_returns_their_logits_alone(target: Target) -> None:
    chosen = torch.tensor([3, 8, 50])
    part, whole = Readout(target, chosen), Readout(target, None)
    hidden = torch.randn(2, 32, device=DEVICE)
    assert torch.allclose(part(hidden), whole(hidden)[:, chosen], atol=1e-6)
    assert part.tokens_at(torch.arange(3, device=DEVICE)).tolist() == [3, 8, 50]

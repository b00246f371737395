"""Saved heads: which target they belong to, and what is refused; the output layer over a part of the tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from layerskip.config import ConfigError
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.heads.folders import load_eagle
from layerskip.heads.readout import Readout, choose_tokens
from layerskip.models import packing
from layerskip.models.loading import load_target
from layerskip.models.target import Target
from layerskip.models.trained_module import save_trained
from tests.accelerator import DEVICE
from tests.drafters.contract import target_of
from tests.families import build
from tests.tiny import save_tiny


@pytest.fixture
def head(tiny_target: Target) -> EagleHead:
    torch.manual_seed(0)
    return EagleHead(EagleShape.of(tiny_target, vocabulary=40), torch.arange(60, 100)).to(DEVICE)


@pytest.fixture
def folder(tiny_target: Target, head: EagleHead, tmp_path: Path) -> Path:
    save_trained(tmp_path / "head", head.shape.to_dict(), head.weights(), tiny_target, {"steps": 0})
    return tmp_path / "head"


def test_a_loaded_head_equals_the_saved_one(tiny_target: Target, head: EagleHead, folder: Path) -> None:
    """It serves its target in any dtype."""
    loaded = load_eagle(folder, tiny_target)
    assert (loaded.shape, loaded.tokens.tolist()) == (head.shape, list(range(60, 100)))
    states = torch.randn(1, 5, head.shape.hidden, device=DEVICE)
    assert torch.equal(loaded(states, states), head.eval()(states, states))
    for dtype in ("bfloat16", "float16"):
        loaded = load_eagle(folder, load_target(tiny_target.name, dtype=dtype, device=DEVICE))
        assert loaded.fc.weight.dtype == getattr(torch, dtype)
        # Reduced precision would move distant positions.
        assert torch.equal(loaded.body.rotary_emb.inv_freq, head.body.rotary_emb.inv_freq)


def test_a_head_for_another_target_is_refused(tiny_target: Target, folder: Path, tmp_path: Path) -> None:
    tuned = load_target(str(save_tiny(tmp_path / "other", seed=5)), dtype="float32", device=DEVICE)
    for other in (tuned, target_of("gemma3_text")):
        with pytest.raises(ConfigError, match="^head: .* made for another target"):
            load_eagle(folder, other)
    about = json.loads((folder / "head.json").read_text())
    about["target"]["revision"] = "old"
    (folder / "head.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="^head: .* made for another target, .* revision is old, not new$"):
        load_eagle(folder, Target(tiny_target.model, tiny_target.tokenizer, tiny_target.name, "new"))


@pytest.mark.parametrize(
    ("file", "content"),
    [("head.safetensors", b"half"), ("head.json", b"{"), ("head.json", b'{"schema": "other/1"}'), ("head.json", None)],
)
def test_an_unreadable_head_is_refused(tiny_target: Target, folder: Path, file: str, content: bytes | None) -> None:
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match="^head: "):
        load_eagle(folder, tiny_target)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("shape", None),
        ("shape", {"heads": 0}),
        ("shape", {"key_value_heads": 3}),
        ("shape", {"intermediate": "wide"}),
        ("shape", {"colour": "red"}),
        ("target", {"weights": ["x"]}),
    ],
)
def test_a_head_with_damaged_metadata_is_refused(
    tiny_target: Target, folder: Path, part: str, value: dict[str, object] | None
) -> None:
    about = json.loads((folder / "head.json").read_text())
    about[part] = value and about[part] | value
    (folder / "head.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match=rf"^head: {folder} is damaged: [^\n]*$"):
        load_eagle(folder, tiny_target)


@pytest.mark.parametrize(
    "change",
    [
        {"fc.weight": None},
        {"fc.weight": torch.zeros(2, 2)},
        {"further": torch.linspace(0.1, 0.9, 3)},
        {"tokens": torch.arange(1000, 1040)},
        {"tokens": torch.arange(40) // 2},
    ],
    ids=str,
)
def test_a_head_with_damaged_weights_is_refused(
    tiny_target: Target, head: EagleHead, folder: Path, change: dict[str, torch.Tensor | None]
) -> None:
    kept = {name: tensor for name, tensor in (head.weights() | change).items() if tensor is not None}
    save_file(kept, folder / "head.safetensors")
    with pytest.raises(ConfigError, match=rf"^head: {folder} is damaged: [^\n]*$"):
        load_eagle(folder, tiny_target)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_rows_are_those_of_common_tokens_and_of_the_text(bias: bool, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(packing._LEAST, 1))  # packs few rows, too
    model = build("llama", vocab_size=880)
    layer = model.lm_head = nn.Linear(model.config.hidden_size, 880, bias=bias, device=DEVICE)
    common, text = (2, 3, 5, 8), list[int]()
    readout, hidden = Readout(Target(model, pack_weights=packed), torch.tensor(common)), torch.randn(2, 32, device=DEVICE)
    for length in (0, 3, 40, 41, 300, 800):  # beyond the reserved rows, twice
        text += [(7 * row + 1) % 900 for row in range(len(text), length)]
        with torch.inference_mode():  # as decoding does
            readout.follow(text)
            logits = layer(hidden)[:, readout.tokens]
            torch.testing.assert_close(readout(hidden), logits, rtol=1e-5, atol=1e-5)
        tokens = readout.tokens.tolist()
        assert tuple(tokens[: len(common)]) == common
        assert sorted(tokens) == sorted({*common, *(token for token in text if token < 880)})
        assert torch.equal(readout.weight, layer.weight[tokens])
        assert torch.equal(readout.bias, layer.bias[tokens]) if bias else readout.bias is None
    readout.begin()
    for text, tokens in ([], [*common]), ([11, 2], [*common, 11]):
        readout.follow(text)
        assert readout.tokens.tolist() == tokens and torch.equal(readout.weight, layer.weight[tokens])


@pytest.mark.parametrize("family", ["cohere", "gemma2", "granite", "llama"])
def test_logits_equal_the_targets(family: str) -> None:
    """Some families scale or cap their logits. A readout over some tokens returns their logits alone."""
    model = build(family)
    target, ids, chosen = Target(model), torch.tensor([[3, 4, 5, 6]], device=DEVICE), torch.tensor([3, 8, 50])
    with torch.no_grad():
        hidden, logits = model.base_model(input_ids=ids).last_hidden_state, model(input_ids=ids).logits
        assert torch.allclose(Readout(target, None)(hidden), logits, atol=1e-5)
        assert torch.allclose(Readout(target, chosen)(hidden), logits[..., chosen], atol=1e-5)
    assert Readout(target, chosen).tokens_at(torch.arange(3, device=DEVICE)).tolist() == [3, 8, 50]


def test_the_most_common_tokens_and_the_required_ones_are_chosen() -> None:
    counts = torch.tensor([5, 0, 9, 1, 7, 0])
    assert choose_tokens(counts, 3, [1]).tolist() == [1, 2, 4]
    assert choose_tokens(counts, 99, []).tolist() == list(range(6))
    assert choose_tokens(torch.zeros(5000), 3, [7]).tolist() == [0, 1, 7]

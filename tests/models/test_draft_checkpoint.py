"""Checkpoints of kept layers load in transformers, compute the same as the skipped model, and serve as draft models."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from layerskip import (
    MaskError,
    SkipMask,
    SpeculativeConfig,
    Target,
    UnsupportedModel,
    generate,
    load_target,
    save_draft_checkpoint,
)
from layerskip.models.skip_view import decoding_view, skip_view
from tests.accelerator import DEVICE
from tests.families import build
from tests.tiny import save_tiny

LENGTH = 40  # several times the sliding windows of tests.families

# Family, changes to its tiny configuration, mask, and fields of the saved configuration.
SLIDING, FULL = "sliding_attention", "full_attention"
CUT: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("llama", {}, "layers:0;layers:2-3", {"num_hidden_layers": 1}),
    ("llama", {}, "", {"num_hidden_layers": 4}),
    ("llama", {"tie_word_embeddings": True}, "layers:2", {"tie_word_embeddings": True}),
    ("llama", {"eos_token_id": [1, 60, 61, 62]}, "layers:2", {"eos_token_id": [1, 60, 61, 62]}),
    ("gpt2", {}, "layers:0;layers:2", {"n_layer": 2}),
    ("gemma3_text", {"layer_types": (SLIDING, SLIDING, FULL)}, "layers:1", {"layer_types": [SLIDING, FULL, SLIDING]}),
    ("gemma3_text", {}, "layers:0;layers:2", {"layer_types": [FULL, FULL]}),
    ("cohere2", {}, "layers:1", {"layer_types": [SLIDING, SLIDING, FULL]}),
    ("qwen2_moe", {"mlp_only_layers": [1, 3]}, "layers:0", {"mlp_only_layers": [0, 2]}),
    ("qwen3_moe", {"mlp_only_layers": [1, 3]}, "layers:1-2", {"mlp_only_layers": [1]}),
    ("smollm3", {"no_rope_layers": [1, 0, 0, 1]}, "layers:2", {"no_rope_layers": [1, 0, 1]}),
    ("gpt_neo", {}, "layers:2", {"attention_layers": ["local", "global", "global"]}),
]


def _logits(model: nn.Module, vocabulary: int) -> Tensor:
    tokens = torch.randint(3, vocabulary, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits: Tensor = model(tokens.to(next(model.parameters()).device), use_cache=False).logits
    return logits


def _load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True).eval().to(DEVICE)


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Five layers, three of which have little effect."""
    folder = save_tiny(tmp_path_factory.mktemp("idle") / "llama", num_hidden_layers=5, idle=(1, 2, 3))
    return load_target(str(folder), dtype="float32", device=DEVICE)


@pytest.fixture(scope="module")
def cut(idle: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint without these three layers."""
    mask = SkipMask.parse("layers:1-3", 5)
    return save_draft_checkpoint(idle, mask, tmp_path_factory.mktemp("cut") / "draft")


@pytest.mark.parametrize(("family", "changes", "text", "fields"), CUT)
def test_the_checkpoint_computes_the_same_as_the_skipped_model(
    tmp_path: Path, family: str, changes: dict[str, Any], text: str, fields: dict[str, Any]
) -> None:
    target = Target(build(family, **changes))
    mask, before = SkipMask.parse(text, target.layers), target.model.config.to_dict()
    plain = _logits(target.model, 64)
    folder = save_draft_checkpoint(target, mask, tmp_path / "new" / "draft")
    assert folder == tmp_path / "new" / "draft"
    assert [file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")] == ["model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    assert {name: config[name] for name in fields} == fields
    expected = _logits(skip_view(target.model, mask), 64)
    torch.testing.assert_close(_logits(_load(folder), 64), expected)
    assert target.model.config.to_dict() == before
    assert _logits(target.model, 64).equal(plain)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_keep_their_dtype(tiny_folder: Path, tmp_path: Path, dtype: str) -> None:
    target = load_target(str(tiny_folder), dtype=dtype, device=DEVICE)
    save_draft_checkpoint(target, SkipMask.parse("layers:1", 3), tmp_path / "draft")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype="auto")
    assert str(loaded.dtype) == f"torch.{dtype}"


def test_it_works_as_assistant_model_of_transformers(idle: Target, cut: Path) -> None:
    tokens = torch.tensor([idle.encode("the rain in the on")], device=DEVICE)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    plain = idle.model.generate(**inputs, do_sample=False, max_new_tokens=32)
    assisted = idle.model.generate(**inputs, do_sample=False, max_new_tokens=32, assistant_model=_load(cut))
    assert assisted.equal(plain)


def test_it_works_as_draft_model(idle: Target, cut: Path) -> None:
    """It is a target with the same tokenizer."""
    plain = generate(idle, "the rain in the on", max_new_tokens=48)
    config = SpeculativeConfig("draft_model", draft_model=str(cut), num_speculative_tokens=4)
    drafted = generate(idle, "the rain in the on", config, max_new_tokens=48)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.acceptance_rate > 0.5
    target = load_target(str(cut), dtype="float32", device=DEVICE)
    assert (target.layers, target.architecture, target.eos_ids) == (2, idle.architecture, idle.eos_ids)
    assert target.encode("the rain, 雨") == idle.encode("the rain, 雨")


def test_a_real_model_from_a_gguf_file_is_cut(smollm2: Target) -> None:
    mask = SkipMask.parse("layers:2-27", 30)
    with tempfile.TemporaryDirectory() as temporary:  # deleted at once, as it is large
        folder = save_draft_checkpoint(smollm2, mask, Path(temporary) / "draft")
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
        loaded = load_target(str(folder), dtype="float32", device=DEVICE)
    expected = _logits(skip_view(smollm2.model, mask), 49152)
    torch.testing.assert_close(_logits(decoding_view(loaded.model), 49152), expected)
    assert smollm2.tokenizer is not None
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.get_vocab() == smollm2.tokenizer.get_vocab()
    assert loaded.encode("Grüß dich!") == smollm2.encode("Grüß dich!")


@pytest.mark.parametrize(
    ("text", "layers", "reason"),
    [
        ("attention:1", 3, "both sub-layers"),
        ("mlp:0;layers:2", 3, "both sub-layers"),
        ("layers:0-2", 3, "every layer"),
        ("layers:1", 4, "is for 4 layers"),
    ],
)
def test_a_mask_that_leaves_no_whole_model_is_refused(
    tiny_target: Target, tmp_path: Path, text: str, layers: int, reason: str
) -> None:
    with pytest.raises(MaskError, match=f"^mask: .*{reason}"):
        save_draft_checkpoint(tiny_target, SkipMask.parse(text, layers), tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


def test_a_non_empty_folder_is_refused_and_kept(tiny_target: Target, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match=str(tmp_path)):
        save_draft_checkpoint(tiny_target, SkipMask.parse("layers:1", 3), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["precious.txt"]


# In the first three, a layer depends on its number or on the number of layers; Bloom cannot be skipped.
@pytest.mark.parametrize(
    ("family", "text"),
    [("diffllama", "layers:1"), ("minicpm3", "layers:2"), ("deepseek_v3", "layers:0"), ("bloom", "layers:1")],
)
def test_a_family_that_cannot_be_cut_is_refused_by_name(tmp_path: Path, family: str, text: str) -> None:
    target = Target(build(family))
    with pytest.raises(UnsupportedModel, match=f"^{target.architecture}: "):
        save_draft_checkpoint(target, SkipMask.parse(text, 4), tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


def test_a_failed_save_leaves_nothing(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    assert tiny_target.tokenizer is not None
    monkeypatch.setattr(tiny_target.tokenizer, "save_pretrained", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_draft_checkpoint(tiny_target, SkipMask.parse("layers:1", 3), tmp_path / "draft")
    assert not (tmp_path / "draft").exists()

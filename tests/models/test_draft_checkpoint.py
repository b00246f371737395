"""Checkpoints of kept layers load in transformers, compute the same as the skipped model, and serve as draft models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from layerskip import (
    DraftPlan,
    SpeculativeConfig,
    Target,
    TargetError,
    UnsupportedModel,
    generate,
    load_target,
    save_draft_checkpoint,
)
from layerskip.draft_plan import PlanError
from layerskip.models.skip_view import skip_view
from tests.accelerator import DEVICE
from tests.families import build
from tests.models.passes import fresh, tokens_of
from tests.tiny import save_gguf, save_tiny

TOKENS = tokens_of(40)  # several times the sliding windows of tests.families

# Family, changes to its tiny configuration, mask, and fields of the saved configuration.
SLIDING, FULL = "sliding_attention", "full_attention"
CUT: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("llama", {}, "layers:0;layers:2-3", {"num_hidden_layers": 1}),
    ("llama", {}, "", {"num_hidden_layers": 4}),
    ("llama", {"tie_word_embeddings": True}, "layers:2", {"tie_word_embeddings": True}),
    ("llama", {"eos_token_id": [1, 60, 61, 62]}, "layers:2", {"eos_token_id": [1, 60, 61, 62]}),
    ("gpt2", {}, "layers:0;layers:2", {"n_layer": 2}),
    ("gemma3_text", {"layer_types": (SLIDING, SLIDING, FULL)}, "layers:1", {"layer_types": [SLIDING, FULL, SLIDING]}),
    ("qwen2_moe", {"mlp_only_layers": [1, 3]}, "layers:0", {"mlp_only_layers": [0, 2]}),
    ("smollm3", {"no_rope_layers": [1, 0, 0, 1]}, "layers:2", {"no_rope_layers": [1, 0, 1]}),
    ("gpt_neo", {}, "layers:2", {"attention_layers": ["local", "global", "global"]}),
]


@pytest.mark.parametrize(("family", "changes", "text", "fields"), CUT)
def test_the_checkpoint_computes_the_same_as_the_skipped_model(
    tmp_path: Path, family: str, changes: dict[str, Any], text: str, fields: dict[str, Any]
) -> None:
    target = Target(build(family, **changes))
    mask, before = DraftPlan.parse(text, target.layers), target.model.config.to_dict()
    plain = fresh(target.model, TOKENS)
    folder = save_draft_checkpoint(target, mask, tmp_path / "new" / "draft")
    assert folder == tmp_path / "new" / "draft"
    assert [file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")] == ["model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    assert {name: config[name] for name in fields} == fields
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True).eval().to(DEVICE)
    torch.testing.assert_close(fresh(loaded, TOKENS), fresh(skip_view(target.model, mask), TOKENS))
    assert target.model.config.to_dict() == before
    assert fresh(target.model, TOKENS).equal(plain)


@pytest.mark.parametrize("source", ["float32", "bfloat16", "gguf"])
def test_it_works_as_draft_model_in_the_dtype_of_its_target(source: str, tmp_path: Path) -> None:
    """It is a target with the same tokenizer. The target's layers 1 to 3 have little effect."""
    folder = save_tiny(tmp_path / "llama", num_hidden_layers=5, idle=(1, 2, 3))
    folder, dtype = (save_gguf(folder, tmp_path / "m.gguf"), "float32") if source == "gguf" else (folder, source)
    target, prompt = load_target(str(folder), dtype=dtype, device=DEVICE), "the rain in the on"
    cut = save_draft_checkpoint(target, DraftPlan.parse("layers:1-3", 5), tmp_path / "draft")
    assert "quantization_config" not in json.loads((cut / "config.json").read_text())
    config = SpeculativeConfig("draft_model", draft_model=str(cut), num_speculative_tokens=4)
    drafted = generate(target, prompt, config, max_new_tokens=48)
    assert drafted.stats.acceptance_rate > 0.5
    assert dtype != "float32" or drafted.tokens == generate(target, prompt, max_new_tokens=48).tokens
    draft, stored = target.drafts[str(cut)], AutoModelForCausalLM.from_pretrained(cut, dtype="auto")
    assert (draft.layers, draft.dtype, draft.eos_ids) == (2, dtype, target.eos_ids)
    assert str(stored.dtype) == f"torch.{dtype}"
    assert draft.encode("the rain, 雨") == target.encode("the rain, 雨")


def test_a_checkpoint_of_fewer_bits_has_the_nearest_codes_and_drafts(tmp_path: Path) -> None:
    """Compared through transformers, which unpacks it."""
    folder = save_tiny(tmp_path / "llama", num_hidden_layers=5, idle=(1, 2, 3), hidden_size=64, intermediate_size=128)
    target = load_target(str(folder), dtype="float32", device=DEVICE)
    plan = DraftPlan.parse("int8;layers:2=skip;layers:1=int4;mlp:3=keep", 5)
    cut = save_draft_checkpoint(target, plan, tmp_path / "draft")
    groups = json.loads((cut / "config.json").read_text())["quantization_config"]["config_groups"].values()
    loaded = AutoModelForCausalLM.from_pretrained(cut, dtype=torch.float32).to(DEVICE)
    fresh(loaded, TOKENS)  # the first pass unpacks the weights
    layers = [name for name, module in loaded.named_modules() if isinstance(module, torch.nn.Linear)]
    matches = {
        name: [group for group in groups if any(re.match(each[3:], name) for each in group["targets"])] for name in layers
    }
    assert max(map(len, matches.values())) == 1
    bits = {name: group["weights"]["num_bits"] for name, found in matches.items() for group in found}
    assert {" ".join(name.split(".")[2:4]): size for name, size in bits.items()} == {
        "0 self_attn": 8, "0 mlp": 8, "1 self_attn": 4, "1 mlp": 4, "2 self_attn": 8, "3 self_attn": 8, "3 mlp": 8
    }  # fmt: skip
    kept = [0, 1, 3, 4]
    for name in layers:
        parts = name.split(".")
        own = ".".join([*parts[:2], str(kept[int(parts[2])]), *parts[3:]]) if "layers" in parts else name
        stored, size = target.model.get_submodule(own).weight.detach(), bits.get(name, 0)
        rows = stored.unflatten(1, (-1, {4: 32, 8: stored.shape[1], 0: 1}[size]))
        step = rows.abs().amax(-1, keepdim=True) / {4: 7.5, 8: 127.5, 0: torch.inf}[size]
        found = loaded.get_submodule(name).weight.unflatten(1, rows.shape[1:])
        assert ((found - rows).abs() <= 0.51 * step + 1e-7).all(), name
    config = SpeculativeConfig("draft_model", draft_model=str(cut), num_speculative_tokens=4)
    drafted = generate(target, "the rain in the on", config, max_new_tokens=48)
    assert drafted.stats.acceptance_rate > 0.3
    assert drafted.tokens == generate(target, "the rain in the on", max_new_tokens=48).tokens


@pytest.mark.parametrize("weights", ["int4", "int8;layers:2=skip"])
def test_a_checkpoint_of_fewer_bits_drafts_for_a_mixed_target(weights: str, tmp_path: Path) -> None:
    if DEVICE != "cpu":
        pytest.skip("mixed is for a CPU")
    folder = save_tiny(tmp_path / "llama", num_hidden_layers=5, idle=(1, 2, 3), hidden_size=64, intermediate_size=128)
    target = load_target(str(folder), dtype="mixed", device="cpu")
    cut = save_draft_checkpoint(target, DraftPlan.parse(weights, 5), tmp_path / "draft")
    config = SpeculativeConfig("draft_model", draft_model=str(cut), num_speculative_tokens=4)
    drafted = generate(target, "the rain in the on", config, max_new_tokens=32)
    assert drafted.tokens == generate(target, "the rain in the on", max_new_tokens=32).tokens
    assert load_target(str(cut), device="cpu").dtype in ("float32", "bfloat16")
    with pytest.raises(TargetError, match="^target.dtype: mixed is for weights that are not quantised"):
        load_target(str(cut), dtype="mixed", device="cpu")


def test_fewer_bits_need_their_library(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel, match="^weights: .*'s extra quantised$"):
        save_draft_checkpoint(tiny_target, DraftPlan.uniform(tiny_target.layers, 4), tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


def test_a_mask_that_leaves_no_whole_model_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    both = "needs both sub-layers"
    for text, layers, reason in (
        ("attention:1", 3, both), ("mlp:0;layers:2", 3, both), ("layers:0-2", 3, "every layer"), ("layers:1", 4, "is for 4")
    ):  # fmt: skip
        with pytest.raises(PlanError, match=f".*{reason}"):
            save_draft_checkpoint(tiny_target, DraftPlan.parse(text, layers), tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


def test_what_has_no_kernels_for_its_bits_is_refused(tmp_path: Path) -> None:
    narrow, quantized = Target(build("llama", intermediate_size=40)), Target(build("llama"))
    with pytest.raises(UnsupportedModel, match="^weights: 4 bits need layers whose inputs are a multiple of 32"):
        save_draft_checkpoint(narrow, DraftPlan.parse("int4", 4), tmp_path / "draft")
    quantized.model.is_quantized = True  # as transformers marks it
    with pytest.raises(UnsupportedModel, match=r"^target\.quantization: no checkpoint can be cut out of a quantised model"):
        save_draft_checkpoint(quantized, DraftPlan.parse("layers:1", 4), tmp_path / "draft")


def test_a_non_empty_folder_is_refused_and_kept(tiny_target: Target, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match=str(tmp_path)):
        save_draft_checkpoint(tiny_target, DraftPlan.parse("layers:1", 3), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["precious.txt"]


# In the first three, a layer depends on its number or on the number of layers; Bloom cannot be skipped.
@pytest.mark.parametrize(
    ("family", "text"),
    [
        *[("diffllama", "layers:1"), ("minicpm3", "layers:2"), ("deepseek_v3", "layers:0"), ("bloom", "layers:1")],
        ("diffllama", "int8;layers:1=skip"),
    ],
)
def test_a_family_that_cannot_be_cut_is_refused_by_name(tmp_path: Path, family: str, text: str) -> None:
    target = Target(build(family))
    with pytest.raises(UnsupportedModel, match=f"^{target.architecture}: "):
        save_draft_checkpoint(target, DraftPlan.parse(text, 4), tmp_path / "draft")
    assert not (tmp_path / "draft").exists()

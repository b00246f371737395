"""Weights that were laid out as one matrix are saved, copied and loaded like weights that were not."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from layerskip import SkipMask, Target, save_draft_checkpoint
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.models.compiled_layers import prepare_compiling, set_compiling
from tests.accelerator import DEVICE
from tests.drafters.contract import deep_toy
from tests.families import build

FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen2"])  # without and with biases


def _laid_out(family: str) -> PreTrainedModel:
    model = build(family)
    set_compiling(model, "on")
    prepare_compiling(model)
    query, key = model.model.layers[1].self_attn.q_proj, model.model.layers[1].self_attn.k_proj
    assert (query.bias is not None) == (family == "qwen2")
    assert query.weight.untyped_storage().data_ptr() == key.weight.untyped_storage().data_ptr()
    return model


@pytest.mark.parametrize(("three_layers", "lookback"), [(False, 0), (False, 2), (True, 0), (True, 2)])
def test_maps_of_a_head_are_one_matrix_also_if_they_read_embeddings(three_layers: bool, lookback: int) -> None:
    head = EagleHead(EagleShape.of(deep_toy(), three_layers, lookback=lookback)).to(DEVICE)
    set_compiling(head.body, "on")
    prepare_compiling(head)
    attention = head.body.layers[0].self_attn
    parts = [getattr(attention, name).weight.untyped_storage().data_ptr() for name in ("q_proj", "k_proj", "v_proj")]
    assert len(set(parts)) == 1


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.arange(3, 12, device=DEVICE)[None]).logits
    return logits


def _stored_bytes(model: nn.Module) -> int:
    """Returns the bytes of all storages, each counted once."""
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in model.state_dict().values()}
    return sum(storages.values())


@FAMILIES
@pytest.mark.parametrize("shard", ["1GB", "10KB"])
def test_a_saved_folder_is_that_of_the_model_as_it_was(family: str, shard: str, tmp_path: Path) -> None:
    model = _laid_out(family)
    for name, saved in (("before", build(family)), ("after", model)):
        saved.save_pretrained(tmp_path / name, max_shard_size=shard)
    before, after = (
        {file.name: file.stat().st_size for file in (tmp_path / name).glob("*.safetensors")} for name in ("before", "after")
    )
    assert after == before
    assert (len(after) > 1) == (shard == "10KB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "after").to(DEVICE)
    assert torch.equal(_logits(loaded), _logits(model))


@FAMILIES
def test_a_saved_state_holds_every_weight_once(family: str) -> None:
    model, sizes = _laid_out(family), []
    for saved in (build(family), model):
        file = io.BytesIO()
        torch.save(saved.state_dict(), file)
        sizes.append(file.tell())
    assert sizes[1] <= sizes[0]  # fewer storages, each with a header
    file.seek(0)
    other = build(family, 1)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(_logits(other), _logits(model))


@FAMILIES
def test_a_copy_has_weights_of_its_own(family: str) -> None:
    model = _laid_out(family)
    expected, copied = _logits(model), copy.deepcopy(model)
    assert _stored_bytes(copied) == _stored_bytes(model) == _stored_bytes(build(family))
    assert torch.equal(_logits(copied), expected)
    with torch.no_grad():
        for weight in copied.parameters():
            weight.zero_()
    assert torch.equal(_logits(model), expected)


def test_a_draft_model_is_cut_out_of_laid_out_weights(tmp_path: Path) -> None:
    for name, model in (("before", build("llama")), ("after", _laid_out("llama"))):
        save_draft_checkpoint(Target(model), SkipMask.parse("layers:1", 4), tmp_path / name)
    before, after = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("before", "after"))
    assert after == before

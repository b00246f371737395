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


@FAMILIES
def test_saved_files_and_states_are_those_of_the_model_as_it_was(family: str, tmp_path: Path) -> None:
    models, sizes, states = {"before": build(family), "after": _laid_out(family)}, [], []
    for name, model in models.items():
        model.save_pretrained(tmp_path / name, max_shard_size="10KB")
        sizes.append({file.name: file.stat().st_size for file in (tmp_path / name).glob("*.safetensors")})
        states.append(io.BytesIO())
        torch.save(model.state_dict(), states[-1])
    assert sizes[0] == sizes[1] and len(sizes[0]) > 1
    assert states[1].tell() <= states[0].tell()  # fewer storages, each with a header
    expected, other = _logits(models["after"]), build(family, 1)
    states[1].seek(0)
    other.load_state_dict(torch.load(states[1], weights_only=True))
    assert torch.equal(_logits(other), expected)
    assert torch.equal(_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "after").to(DEVICE)), expected)


@FAMILIES
def test_a_copy_has_weights_of_its_own(family: str) -> None:
    model = _laid_out(family)
    expected, copied = _logits(model), copy.deepcopy(model)
    storages = [[part.untyped_storage() for part in each.state_dict().values()] for each in (model, copied)]
    own, other = ({storage.data_ptr(): storage.nbytes() for storage in each} for each in storages)
    assert not own.keys() & other.keys() and sum(own.values()) == sum(other.values())
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

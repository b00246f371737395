"""Weights that were laid out as one matrix are saved, copied and loaded like weights that were not."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.models.compiled_layers import prepare_compiling, set_compiling
from tests.accelerator import DEVICE
from tests.drafters.contract import deep_toy
from tests.families import build
from tests.models.passes import fresh, tokens_of

FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen2"])  # without and with biases
TOKENS = tokens_of(9)


def _laid_out(family: str) -> PreTrainedModel:
    model = build(family)
    set_compiling(model, "on")
    prepare_compiling(model)
    query, key = model.model.layers[1].self_attn.q_proj, model.model.layers[1].self_attn.k_proj
    assert (query.bias is not None) == (family == "qwen2")
    assert query.weight.untyped_storage().data_ptr() == key.weight.untyped_storage().data_ptr()
    return model


@pytest.mark.parametrize(("three_layers", "lookback"), [(False, 0), (True, 2)])
def test_maps_of_a_head_are_one_matrix_also_if_they_read_embeddings(three_layers: bool, lookback: int) -> None:
    head = EagleHead(EagleShape.of(deep_toy(), three_layers, lookback=lookback)).to(DEVICE)
    set_compiling(head.body, "on")
    prepare_compiling(head)
    attention = head.body.layers[0].self_attn
    assert (
        len({part.weight.untyped_storage().data_ptr() for part in (attention.q_proj, attention.k_proj, attention.v_proj)})
        == 1
    )


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
    expected, other = fresh(models["after"], TOKENS), build(family, 1)
    states[1].seek(0)
    other.load_state_dict(torch.load(states[1], weights_only=True))
    assert torch.equal(fresh(other, TOKENS), expected)
    assert torch.equal(fresh(AutoModelForCausalLM.from_pretrained(tmp_path / "after").to(DEVICE), TOKENS), expected)


@FAMILIES
def test_a_copy_has_weights_of_its_own(family: str) -> None:
    model = _laid_out(family)
    expected, copied = fresh(model, TOKENS), copy.deepcopy(model)
    storages = [[part.untyped_storage() for part in each.state_dict().values()] for each in (model, copied)]
    own, other = ({storage.data_ptr(): storage.nbytes() for storage in each} for each in storages)
    assert not own.keys() & other.keys() and sum(own.values()) == sum(other.values())
    assert torch.equal(fresh(copied, TOKENS), expected)
    with torch.no_grad():
        for weight in copied.parameters():
            weight.zero_()
    assert torch.equal(fresh(model, TOKENS), expected)

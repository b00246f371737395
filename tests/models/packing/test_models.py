"""Decoding with packed weights compared with transformers' generate, and the setting that enables them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from layerskip import SkipMask, SpeculativeConfig, Target, TargetError, generate, load_target
from layerskip.costs.profile import Repeats, profile_costs
from layerskip.device.memory import tensor_bytes, total_bytes
from layerskip.drafters.registry import build_drafter
from layerskip.measure.measure import Decoder, Task
from layerskip.models import packing
from layerskip.models.bridge import Bridges, BridgeShape, save_bridges
from layerskip.models.draft_head import DraftHead
from layerskip.models.environment import machine
from layerskip.models.loading import load_draft
from layerskip.models.packing import pack_like, uses_packing
from layerskip.models.skip_view import decoding_view, skip_view
from tests.families import REPRESENTATIVE, build
from tests.models.packing.layers import DTYPES, layer_of, needs_packing


@needs_packing
def test_a_weight_changed_through_data_is_detected_before_the_next_text() -> None:
    """Merging adapters writes to a weight's ``data``, which torch does not count as a new version."""
    target = Target(build("llama"))
    before = generate(target, [1, 2, 3], SpeculativeConfig("layer_skip", 2, mask="layers:1"), max_new_tokens=12).tokens
    for part in target.model.modules():
        if type(part) is nn.Linear:
            part.weight.data += 0.2 * torch.randn(part.weight.shape, generator=torch.Generator().manual_seed(1))
    actual = generate(target, [1, 2, 3], SpeculativeConfig("layer_skip", 2, mask="layers:1"), max_new_tokens=12).tokens
    expected = target.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=12, do_sample=False)[0, 3:].tolist()
    assert actual == expected != before


@needs_packing
def test_views_share_packed_weights_and_the_model_keeps_its_own_forward(packed: list[Tensor]) -> None:
    target = Target(build("llama"))
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        whole = decoding_view(target.model)(ids).logits
        assert len(packed) == sum(type(part) is nn.Linear for part in target.model.modules())
        skip_view(target.model, SkipMask.parse("layers:1", target.layers))(ids)
        build_drafter(SpeculativeConfig("layer_skip", 2, mask="attention:0"), target)
        before = len(packed)
        torch.testing.assert_close(target.model(ids).logits, whole, rtol=1e-4, atol=1e-5)
        assert len(packed) == before == len({id(weight) for weight in packed})


@needs_packing
def test_packing_follows_the_setting_and_otherwise_the_memory(monkeypatch: pytest.MonkeyPatch, packed: list[Tensor]) -> None:
    assert uses_packing(Target(build("llama")).model)
    refused = Target(build("llama"), pack_weights=False)
    assert not machine(refused)["packed_weights"]
    plain = generate(refused, [1, 2, 3], SpeculativeConfig("layer_skip", 2, mask="layers:1"), max_new_tokens=8)
    head = DraftHead(refused.model, torch.tensor([1, 2]), refused.vocabulary)
    assert head.tokens.tolist() == [1, 2]
    assert not packed
    model = build("llama")
    needed = sum(part.weight.nbytes for part in model.modules() if type(part) is nn.Linear)
    monkeypatch.setattr(packing, "total_bytes", lambda: 4 * needed - 1)
    assert not uses_packing(model)
    assert uses_packing(Target(build("llama"), pack_weights=True).model)
    monkeypatch.setattr(packing, "total_bytes", lambda: 4 * needed)
    target = Target(build("llama"))
    assert machine(target)["packed_weights"]
    drafted = generate(target, [1, 2, 3], SpeculativeConfig("layer_skip", 2, mask="layers:1"), max_new_tokens=8)
    assert drafted.tokens == plain.tokens
    assert packed


@needs_packing
def test_a_view_is_rebuilt_when_a_dtype_change_makes_more_weights_packable(
    monkeypatch: pytest.MonkeyPatch, packed: list[Tensor]
) -> None:
    if not packing._is_supported(torch.bfloat16):
        pytest.skip("this processor does not support packed weights in bfloat16")
    model = build("gpt_bigcode")  # its conversion keeps every tensor object
    largest = max(part.weight.numel() for part in model.modules() if type(part) is nn.Linear)
    monkeypatch.setattr(packing, "_LEAST", {torch.float32: largest, torch.bfloat16: 1})
    count = []
    for dtype in DTYPES:
        view = decoding_view(model.to(dtype))
        with torch.inference_mode():
            view(torch.tensor([[1, 2, 3]]))
        count.append(len(packed))
        packed.clear()
    assert 0 < count[0] < count[1] == sum(type(part) is nn.Linear for part in model.modules())


@needs_packing
@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_every_family_decodes_with_packed_weights(family: str, packed: list[Tensor]) -> None:
    target = Target(build(family))
    prompt = [3, 4, 5, 3, 4, 5, 3, 4]
    plain, drafted = (
        generate(target, prompt, config, max_new_tokens=12).tokens
        for config in (SpeculativeConfig(), SpeculativeConfig("layer_skip", 2, mask="layers:1"))
    )
    ids = torch.tensor([prompt])
    output = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert plain == drafted == output[0, len(prompt) :].tolist()
    assert packed


def test_an_unsupported_processor_packs_nothing(monkeypatch: pytest.MonkeyPatch, packed: list[Tensor]) -> None:
    monkeypatch.setattr(packing, "_is_supported", lambda dtype: False)
    target = Target(build("llama"), pack_weights=True)
    assert not uses_packing(target.model)
    generate(target, [1, 2, 3], SpeculativeConfig(), max_new_tokens=4)
    assert not packed


def test_draft_models_use_the_packing_setting_of_their_target(tiny_folder: Path) -> None:
    target = load_target(str(tiny_folder), dtype="float32", device="cpu", pack_weights=False)
    assert not uses_packing(load_draft(target, str(tiny_folder)).model)


@needs_packing
def test_packed_weights_are_counted_unless_they_are_the_targets() -> None:
    layer = pack_like(build("llama"), layer_of(torch.float32))
    with torch.no_grad():
        layer(torch.randn(1, 80))
    assert 2 * layer.weight.nbytes <= tensor_bytes(layer) < 3 * layer.weight.nbytes
    target = Target(build("llama"))
    decoder = Decoder.of(target, SpeculativeConfig("layer_skip", 2, mask="layers:1"))
    decoder([1, 2, 3], Task(max_new_tokens=4), lambda _: None)
    assert decoder.memory_bytes() < 1000  # Python objects only
    assert 2**28 < total_bytes() < 2**48


@needs_packing
def test_bridges_are_timed_and_decode_with_packed_weights(tmp_path: Path, packed: list[Tensor]) -> None:
    target = Target(build("llama"))
    profile_costs(target, 12, 2, repeats=Repeats(1), bridged=True)
    own = {id(weight) for weight in target.model.parameters()}
    timed = {weight.shape for weight in packed if id(weight) not in own}
    assert torch.Size((target.hidden, target.hidden)) in timed
    mask = SkipMask.parse("layers:1", target.layers)
    save_bridges(tmp_path / "bridge", Bridges(BridgeShape.of(target, mask, "linear")), target, {})
    packed.clear()
    config = SpeculativeConfig("layer_skip", 2, mask="layers:1", bridge=str(tmp_path / "bridge"))
    generate(target, [1, 2, 3], config, max_new_tokens=4)
    assert torch.Size((target.hidden, target.hidden)) in {weight.shape for weight in packed}


@needs_packing
def test_a_later_setting_applies_to_existing_views(packed: list[Tensor]) -> None:
    target = Target(build("llama"))
    generate(target, [1, 2, 3], SpeculativeConfig(), max_new_tokens=4)
    assert packed
    again = Target(target.model, pack_weights=False)
    assert not machine(again)["packed_weights"]
    assert not any(type(part) is packing._PackedLinear for part in decoding_view(again.model).modules())


def test_an_invalid_setting_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(TargetError, match=r"^target\.pack_weights: 'auto' is not true, false or null"):
        load_target(str(tiny_folder), pack_weights="auto")  # type: ignore[arg-type]

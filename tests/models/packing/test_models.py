"""Models that decode by weights that are laid out, against transformers' generate, and who decides that they do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from layerskip import SkipMask, SpeculativeConfig, Target, TargetError, generate, load_target
from layerskip.costs.profile import profile_costs
from layerskip.device.memory import held_bytes, total_bytes
from layerskip.drafters.registry import build_drafter
from layerskip.measure.measure import Decoder, Task
from layerskip.models import packing
from layerskip.models.bridge import Bridges, BridgeShape, save_bridges
from layerskip.models.draft_head import DraftHead
from layerskip.models.environment import machine
from layerskip.models.loading import load_draft
from layerskip.models.packing import packed_like, packs
from layerskip.models.skip_view import decoding_view, skip_view
from tests.families import SKIPPABLE, build
from tests.models.packing.layers import DTYPES, layer_of, needs_layouts


@needs_layouts
def test_a_weight_that_was_changed_unseen_is_noticed_before_the_next_text() -> None:
    """As adapters are merged: torch tells nobody when a weight's ``data`` is written to."""
    target = Target(build("llama"))
    before = generate(target, [1, 2, 3], SpeculativeConfig("layer_skip", 2, mask="layers:1"), max_new_tokens=12).tokens
    for part in target.model.modules():
        if type(part) is nn.Linear:
            part.weight.data += 0.2 * torch.randn(part.weight.shape, generator=torch.Generator().manual_seed(1))
    found = generate(target, [1, 2, 3], SpeculativeConfig("layer_skip", 2, mask="layers:1"), max_new_tokens=12).tokens
    expected = target.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=12, do_sample=False)[0, 3:].tolist()
    assert found == expected != before


@needs_layouts
def test_views_share_one_layout_of_a_weight_and_the_model_keeps_its_own_forward(laid_out: list[Tensor]) -> None:
    target = Target(build("llama"))
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        whole = decoding_view(target.model)(ids).logits
        assert len(laid_out) == sum(type(part) is nn.Linear for part in target.model.modules())
        skip_view(target.model, SkipMask.parse("layers:1", target.layers))(ids)
        build_drafter(SpeculativeConfig("layer_skip", 2, mask="attention:0"), target)
        before = len(laid_out)
        torch.testing.assert_close(target.model(ids).logits, whole, rtol=1e-4, atol=1e-5)
        assert len(laid_out) == before == len({id(weight) for weight in laid_out})


@needs_layouts
def test_who_decides_whether_weights_are_laid_out(monkeypatch: pytest.MonkeyPatch, laid_out: list[Tensor]) -> None:
    assert packs(Target(build("llama")).model)
    refused = Target(build("llama"), pack_weights=False)
    assert not machine(refused)["packed_weights"]
    plain = generate(refused, [1, 2, 3], SpeculativeConfig("layer_skip", 2, mask="layers:1"), max_new_tokens=8)
    head = DraftHead(refused.model, torch.tensor([1, 2]), refused.vocabulary)
    assert head.tokens.tolist() == [1, 2]
    assert not laid_out
    model = build("llama")
    takes = sum(part.weight.nbytes for part in model.modules() if type(part) is nn.Linear)
    monkeypatch.setattr(packing, "total_bytes", lambda: 4 * takes - 1)
    assert not packs(model)
    assert packs(Target(build("llama"), pack_weights=True).model)
    monkeypatch.setattr(packing, "total_bytes", lambda: 4 * takes)
    found = Target(build("llama"))
    assert machine(found)["packed_weights"]
    drafted = generate(found, [1, 2, 3], SpeculativeConfig("layer_skip", 2, mask="layers:1"), max_new_tokens=8)
    assert drafted.tokens == plain.tokens
    assert laid_out


@needs_layouts
def test_a_view_is_made_anew_where_other_weights_are_large_enough(
    monkeypatch: pytest.MonkeyPatch, laid_out: list[Tensor]
) -> None:
    if not packing._multiplies(torch.bfloat16):
        pytest.skip("this processor multiplies by no layouts in bfloat16")
    model = build("gpt_bigcode")  # no tensor of which is another one when it is converted
    largest = max(part.weight.numel() for part in model.modules() if type(part) is nn.Linear)
    monkeypatch.setattr(packing, "_LEAST", {torch.float32: largest, torch.bfloat16: 1})
    count = []
    for dtype in DTYPES:
        view = decoding_view(model.to(dtype))
        with torch.inference_mode():
            view(torch.tensor([[1, 2, 3]]))
        count.append(len(laid_out))
        laid_out.clear()
    assert 0 < count[0] < count[1] == sum(type(part) is nn.Linear for part in model.modules())


@needs_layouts
@pytest.mark.parametrize("family", SKIPPABLE)
def test_every_family_decodes_by_layouts(family: str, laid_out: list[Tensor]) -> None:
    target = Target(build(family))
    prompt = [3, 4, 5, 3, 4, 5, 3, 4]
    plain, drafted = (
        generate(target, prompt, config, max_new_tokens=12).tokens
        for config in (SpeculativeConfig(), SpeculativeConfig("layer_skip", 2, mask="layers:1"))
    )
    ids = torch.tensor([prompt])
    output = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert plain == drafted == output[0, len(prompt) :].tolist()
    assert laid_out


def test_a_processor_that_cannot_does_not(monkeypatch: pytest.MonkeyPatch, laid_out: list[Tensor]) -> None:
    monkeypatch.setattr(packing, "_multiplies", lambda dtype: False)
    target = Target(build("llama"), pack_weights=True)
    assert not packs(target.model)
    generate(target, [1, 2, 3], SpeculativeConfig(), max_new_tokens=4)
    assert not laid_out


def test_draft_models_are_loaded_as_their_target(tiny_folder: Path) -> None:
    target = load_target(str(tiny_folder), dtype="float32", device="cpu", pack_weights=False)
    assert not packs(load_draft(target, str(tiny_folder)).model)


@needs_layouts
def test_what_is_laid_out_is_counted_where_it_is_not_the_targets() -> None:
    layer = packed_like(build("llama"), layer_of(torch.float32))
    with torch.no_grad():
        layer(torch.randn(1, 80))
    assert 2 * layer.weight.nbytes <= held_bytes(layer) < 3 * layer.weight.nbytes
    target = Target(build("llama"))
    decoder = Decoder.of(target, SpeculativeConfig("layer_skip", 2, mask="layers:1"))
    decoder([1, 2, 3], Task(max_new_tokens=4), lambda _: None)
    assert decoder.held_bytes() < 1000  # Python's own
    assert 2**28 < total_bytes() < 2**48


@needs_layouts
def test_bridges_are_timed_and_decode_with_layouts(tmp_path: Path, laid_out: list[Tensor]) -> None:
    target = Target(build("llama"))
    profile_costs(target, 12, 2, repeats=1, bridged=True)
    own = {id(weight) for weight in target.model.parameters()}
    timed = {weight.shape for weight in laid_out if id(weight) not in own}
    assert torch.Size((target.hidden, target.hidden)) in timed
    mask = SkipMask.parse("layers:1", target.layers)
    save_bridges(tmp_path / "bridge", Bridges(BridgeShape.of(target, mask, "linear")), target, {})
    laid_out.clear()
    config = SpeculativeConfig("layer_skip", 2, mask="layers:1", bridge=str(tmp_path / "bridge"))
    generate(target, [1, 2, 3], config, max_new_tokens=4)
    assert torch.Size((target.hidden, target.hidden)) in {weight.shape for weight in laid_out}


@needs_layouts
def test_a_decision_holds_for_views_that_were_made_before_it(laid_out: list[Tensor]) -> None:
    target = Target(build("llama"))
    generate(target, [1, 2, 3], SpeculativeConfig(), max_new_tokens=4)
    assert laid_out
    again = Target(target.model, pack_weights=False)
    assert not machine(again)["packed_weights"]
    assert not any(type(part) is packing._PackedLinear for part in decoding_view(again.model).modules())


def test_what_is_no_decision_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(TargetError, match="^pack_weights: 'auto' is not true, false or null"):
        load_target(str(tiny_folder), pack_weights="auto")  # type: ignore[arg-type]

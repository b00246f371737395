"""Products by weights that are laid out once, against torch's own, and against what becomes of the weights."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from layerskip import SkipMask, SpeculativeConfig, Target, TargetError, generate, load_target, packing
from layerskip.bridge import Bridges, BridgeShape, save_bridges
from layerskip.draft_head import DraftHead
from layerskip.drafters.build import build_drafter
from layerskip.environment import machine
from layerskip.loading import load_draft
from layerskip.measure import Decoder, Task
from layerskip.memory import held_bytes, total_bytes
from layerskip.output_rows import OutputRows
from layerskip.packing import multiply, pack_matrices, packed_like, packs
from layerskip.profiling import profile_costs
from layerskip.view import decoding_view, skip_view
from tests.families import SKIPPABLE, build

needs = pytest.mark.skipif(not packing._multiplies(torch.float32), reason="this processor multiplies by no layouts")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are tiny, and laid out all the same."""
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(DTYPES, 1))


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """All that is laid out."""
    made: list[Tensor] = []

    def lay_out(weight: Tensor) -> Tensor | None:
        made.append(weight)
        return original(weight)

    original = packing.lay_out
    monkeypatch.setattr(packing, "lay_out", lay_out)
    return made


def _layer(dtype: torch.dtype, bias: bool = True, width: int = 80, out: int = 112) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, out, bias, dtype=dtype)


def _same(found: Tensor, expected: Tensor, bias: bool = False) -> None:
    assert found.dtype == expected.dtype
    if expected.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    elif bias:  # in some shapes torch rounds before it adds
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
    else:
        assert torch.equal(found, expected)  # bit by bit, in any number of rows


@needs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (5,), (1, 1), (2, 3), (1, 300), (0,), ()])
def test_products_are_torchs(dtype: torch.dtype, bias: bool, rows: tuple[int, ...], laid_out: list[Tensor]) -> None:
    layer = _layer(dtype, bias)
    pack_matrices(layer)
    hidden = torch.randn(*rows, 80).to(dtype)
    with torch.no_grad():
        _same(multiply(hidden, layer.weight, layer.bias), linear(hidden, layer.weight, layer.bias), bias)
        every_other = torch.randn(*rows, 160).to(dtype)[..., ::2]  # not one behind the other
        _same(multiply(every_other, layer.weight, layer.bias), linear(every_other, layer.weight, layer.bias), bias)
    assert len(laid_out) == (packing._multiplies(dtype) and 0 not in rows)


@needs
@pytest.mark.parametrize("width", [1, 7, 33, 64, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_any_width_are_torchs(dtype: torch.dtype, width: int) -> None:
    layer = _layer(dtype, False, width, 3 * width + 1)
    pack_matrices(layer)
    for rows in (1, 4, 17):
        hidden = torch.randn(rows, width).to(dtype)
        with torch.inference_mode():
            _same(multiply(hidden, layer.weight), linear(hidden, layer.weight))


@needs
def test_a_weight_that_was_changed_is_laid_out_anew(laid_out: list[Tensor]) -> None:
    layer, hidden = _layer(torch.float32, False), torch.randn(3, 80)
    pack_matrices(layer)

    def check() -> None:
        with torch.no_grad():
            for _ in range(2):
                _same(multiply(hidden, layer.weight), linear(hidden, layer.weight))

    check()
    with torch.no_grad():
        layer.weight.mul_(2)
    check()
    layer.load_state_dict(_layer(torch.float32, False).state_dict())
    check()
    layer.weight.data = torch.randn(112, 80)
    check()
    assert len(laid_out) == 4
    layer.to(torch.bfloat16)
    hidden = hidden.to(torch.bfloat16)
    check()


@needs
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


@needs
@pytest.mark.parametrize("learning", ["hidden", "weight", "bias"])
def test_gradients_are_torchs(learning: str, laid_out: list[Tensor]) -> None:
    layer, hidden = _layer(torch.float32).requires_grad_(False), torch.randn(3, 80)
    pack_matrices(layer)
    leaf = {"hidden": hidden, "weight": layer.weight, "bias": layer.bias}[learning].requires_grad_()
    found, expected = (
        torch.autograd.grad(product(hidden, layer.weight, layer.bias).square().sum(), leaf) for product in (multiply, linear)
    )
    torch.testing.assert_close(found, expected)
    assert not laid_out


@needs
def test_autocast_rounds_as_it_does_elsewhere() -> None:
    layer, hidden = _layer(torch.float32, False), torch.randn(3, 80)
    pack_matrices(layer)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert multiply(hidden, layer.weight).dtype == torch.bfloat16


@needs
def test_copies_multiply_by_their_own_weights() -> None:
    hidden = torch.randn(1, 80)
    layer = packed_like(build("llama"), _layer(torch.float32, False))
    with torch.no_grad():
        before = layer(hidden)
        for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            copied.weight.mul_(2)
            torch.testing.assert_close(copied(hidden), 2 * before)
        assert torch.equal(layer(hidden), before)


@needs
def test_whose_forward_is_another_keeps_it() -> None:
    layer = _layer(torch.float32)
    layer.forward = lambda hidden: hidden  # type: ignore[method-assign, assignment]
    assert packed_like(build("llama"), layer)(torch.ones(1, 80)).tolist() == [[1.0] * 80]


@needs
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_text_join_those_that_are_laid_out(dtype: torch.dtype, laid_out: list[Tensor]) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(300, 40).to(dtype), torch.randn(300).to(dtype)
    for offset in (None, bias):
        rows, hidden = OutputRows(weight, offset, torch.arange(0, 300, 3), 280, packed=True), torch.randn(2, 40).to(dtype)
        for text in ([], [1, 3, 5], [1, 3, 5, 290, 8]):
            rows.follow(text)
            with torch.inference_mode():
                _same(rows.multiply(hidden), linear(hidden, weight, offset)[:, rows.tokens], offset is not None)


@needs
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


@needs
def test_layouts_are_forgotten_with_their_weights() -> None:
    layer = _layer(torch.float32)
    pack_matrices(layer)
    with torch.no_grad():
        multiply(torch.randn(1, 80), layer.weight)
    gc.collect()
    before = len(packing._layouts)
    del layer
    gc.collect()
    assert len(packing._layouts) == before - 1


@needs
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


@needs
def test_small_weights_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch, laid_out: list[Tensor]) -> None:
    monkeypatch.setattr(packing, "_LEAST", {torch.float32: 80 * 112})
    small, large = _layer(torch.float32, width=79), _layer(torch.float32)
    tree = packed_like(large, nn.ModuleList([small, large]))
    with torch.no_grad():
        tree[0](torch.randn(1, 79))
        tree[1](torch.randn(1, 80))
    assert [id(weight) for weight in laid_out] == [id(large.weight)]
    assert not packs(build("llama"))


@needs
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


@needs
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


@needs
def test_what_is_laid_out_is_counted_where_it_is_not_the_targets() -> None:
    layer = packed_like(build("llama"), _layer(torch.float32))
    with torch.no_grad():
        layer(torch.randn(1, 80))
    assert 2 * layer.weight.nbytes <= held_bytes(layer) < 3 * layer.weight.nbytes
    target = Target(build("llama"))
    decoder = Decoder.of(target, SpeculativeConfig("layer_skip", 2, mask="layers:1"))
    decoder([1, 2, 3], Task(max_new_tokens=4), lambda _: None)
    assert decoder.held_bytes() == 0
    assert 2**28 < total_bytes() < 2**48


@needs
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


@needs
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

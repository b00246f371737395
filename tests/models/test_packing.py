"""Packed weights: products compared with torch's own, decoding with transformers' generate, lifetime of copies, settings."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from layerskip import DraftPlan, SpeculativeConfig, Target, generate, load_target
from layerskip.drafters.registry import build_drafter
from layerskip.heads.readout import Readout
from layerskip.models import packing
from layerskip.models.environment import machine
from layerskip.models.loading import load_draft
from layerskip.models.packing import multiply, pack_like, uses_packing
from layerskip.models.skip_view import decoding_view, skip_view
from tests.accelerator import DEVICE
from tests.exhaustive import representative
from tests.families import REPRESENTATIVE, build
from tests.reference import generated

pytestmark = pytest.mark.skipif(
    DEVICE != "cpu" or not packing._is_supported(torch.float32), reason="needs a processor that supports packed weights"
)
FEW = ["llama", "gpt2", "gpt_oss", "phi"]
FAMILIES = representative(FEW, [family for family in REPRESENTATIVE if family not in FEW])
DTYPES = [torch.float32, torch.bfloat16]
SKIP = SpeculativeConfig("layer_skip", 2, mask="layers:1")


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Pack the weights of tiny models too, and record all packed weights."""
    weights: list[Tensor] = []

    def pack_weight(weight: Tensor) -> Tensor | None:
        weights.append(weight)
        return original(weight)

    original = packing.pack_weight
    monkeypatch.setattr(packing, "pack_weight", pack_weight)
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(DTYPES, 1))
    return weights


def layer_of(dtype: torch.dtype, bias: bool = True, width: int = 80, out: int = 112) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, out, bias, dtype=dtype)


def _assert_same(actual: Tensor, expected: Tensor, bias: bool = False) -> None:
    assert actual.dtype == expected.dtype
    if expected.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    elif bias:  # in some shapes torch rounds before it adds the bias
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7)
    else:
        assert torch.equal(actual, expected)  # bitwise, for any number of rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [1, 33, 80, 576])
def test_products_equal_torchs(dtype: torch.dtype, bias: bool, width: int, packed: list[Tensor]) -> None:
    layer = layer_of(dtype, bias, width, 3 * width + 1)
    pack_like(build("llama"), layer)
    with torch.no_grad():
        for rows in ((1,), (5,), (1, 1), (2, 3), (1, 300), (0,), ()):
            hidden, every_other = torch.randn(*rows, width).to(dtype), torch.randn(*rows, 2 * width).to(dtype)[..., ::2]
            for given in (hidden, every_other):  # the second is not contiguous
                expected = linear(given, layer.weight, layer.bias)
                _assert_same(multiply(given, layer.weight, layer.bias), expected, bias)
    assert len(packed) == packing._is_supported(dtype)


def test_a_changed_weight_is_packed_again(packed: list[Tensor]) -> None:
    layer, hidden = layer_of(torch.float32, False), torch.randn(3, 80)
    pack_like(build("llama"), layer)

    def replace_data() -> None:
        layer.weight.data = torch.randn(112, 80)

    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: layer.weight.mul_(2),
        lambda: layer.load_state_dict(layer_of(torch.float32, False).state_dict()),
        replace_data,
    ]
    with torch.no_grad():
        for change in changes:
            change()
            for _ in range(2):
                _assert_same(multiply(hidden, layer.weight), linear(hidden, layer.weight))
        assert len(packed) == 4
        layer.to(torch.bfloat16)
        _assert_same(multiply(hidden.bfloat16(), layer.weight), linear(hidden.bfloat16(), layer.weight))


@pytest.mark.parametrize("differentiated", ["hidden", "weight", "bias"])
def test_gradients_equal_torchs(differentiated: str, packed: list[Tensor]) -> None:
    layer, hidden = layer_of(torch.float32).requires_grad_(False), torch.randn(3, 80)
    pack_like(build("llama"), layer)
    leaf = {"hidden": hidden, "weight": layer.weight, "bias": layer.bias}[differentiated].requires_grad_()
    actual, expected = (
        torch.autograd.grad(product(hidden, layer.weight, layer.bias).square().sum(), leaf) for product in (multiply, linear)
    )
    torch.testing.assert_close(actual, expected)
    assert not packed
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert multiply(hidden, layer.weight).dtype == torch.bfloat16


def test_copies_multiply_by_their_own_weights() -> None:
    layer, hidden = pack_like(build("llama"), layer_of(torch.float32, False)), torch.randn(1, 80)
    with torch.no_grad():
        before = layer(hidden)
        for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            copied.weight.mul_(2)
            torch.testing.assert_close(copied(hidden), 2 * before)
        assert torch.equal(layer(hidden), before)


def test_packed_copies_are_freed_with_their_weights(packed: list[Tensor]) -> None:
    layer = layer_of(torch.float32)
    pack_like(build("llama"), layer)
    with torch.no_grad():
        multiply(torch.randn(1, 80), layer.weight)
    gc.collect()
    before = len(packing._packed[0])
    packed.clear()
    del layer
    gc.collect()
    assert len(packing._packed[0]) == before - 1


def test_small_weights_and_replaced_forward_passes_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, packed: list[Tensor]
) -> None:
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(DTYPES, 80 * 112))
    small, large, replaced = layer_of(torch.float32, width=79), layer_of(torch.float32), layer_of(torch.float32)
    replaced.forward = lambda hidden: hidden  # type: ignore[method-assign, assignment]
    tree = pack_like(large, nn.ModuleList([small, large, replaced]))
    with torch.no_grad():
        tree[0](torch.randn(1, 79))
        tree[1](torch.randn(1, 80))
        assert tree[2](torch.ones(1, 80)).tolist() == [[1.0] * 80]
    assert [id(weight) for weight in packed] == [id(large.weight)]
    assert not uses_packing(build("llama"))


def test_a_weight_changed_through_data_is_detected_before_the_next_text() -> None:
    """Merging adapters writes to a weight's ``data``, which torch does not count as a new version."""
    target = Target(build("llama"))
    before = generate(target, [1, 2, 3], SKIP, max_new_tokens=12).tokens
    for part in target.model.modules():
        if type(part) is nn.Linear:
            part.weight.data += 0.2 * torch.randn(part.weight.shape, generator=torch.Generator().manual_seed(1))
    actual = generate(target, [1, 2, 3], SKIP, max_new_tokens=12).tokens
    assert actual == generated(target.model, [1, 2, 3], 12) != before


def test_views_share_packed_weights_and_the_model_keeps_its_own_forward(packed: list[Tensor]) -> None:
    target = Target(build("llama"))
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        whole = decoding_view(target.model)(ids).logits
        assert len(packed) == sum(type(part) is nn.Linear for part in target.model.modules())
        skip_view(target.model, DraftPlan.parse("layers:1", target.layers))(ids)
        build_drafter(SpeculativeConfig("layer_skip", 2, mask="attention:0"), target)
        before = len(packed)
        torch.testing.assert_close(target.model(ids).logits, whole, rtol=1e-4, atol=1e-5)
        assert len(packed) == before == len({id(weight) for weight in packed})


def test_packing_follows_the_setting_and_otherwise_the_memory(monkeypatch: pytest.MonkeyPatch, packed: list[Tensor]) -> None:
    refused = Target(build("llama"), pack_weights=False)
    assert not machine(refused)["packed_weights"]
    plain = generate(refused, [1, 2, 3], SKIP, max_new_tokens=8)
    Readout(refused, torch.tensor([1, 2]))
    assert not packed
    model = build("llama")
    needed = sum(part.weight.nbytes for part in model.modules() if type(part) is nn.Linear)
    monkeypatch.setattr(packing, "total_bytes", lambda: 4 * needed - 1)
    assert not uses_packing(model)
    assert uses_packing(Target(build("llama"), pack_weights=True).model)
    monkeypatch.setattr(packing, "total_bytes", lambda: 4 * needed)
    target = Target(build("llama"))
    assert machine(target)["packed_weights"]
    assert generate(target, [1, 2, 3], SKIP, max_new_tokens=8).tokens == plain.tokens
    assert packed
    monkeypatch.setattr(packing, "_is_supported", lambda dtype: False)
    assert not uses_packing(Target(build("llama"), pack_weights=True).model)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_with_packed_weights(family: str, packed: list[Tensor]) -> None:
    target = Target(build(family))
    prompt = [3, 4, 5, 3, 4, 5, 3, 4]
    plain, drafted = (generate(target, prompt, config, max_new_tokens=12).tokens for config in (SpeculativeConfig(), SKIP))
    assert plain == drafted == generated(target.model, prompt, 12)
    assert packed


def test_a_later_setting_applies_to_existing_views_and_to_draft_models(tiny_folder: Path, packed: list[Tensor]) -> None:
    target = load_target(str(tiny_folder), dtype="float32", device="cpu")
    generate(target, [7, 8, 9], SpeculativeConfig(), max_new_tokens=4)
    assert packed
    again = Target(target.model, target.tokenizer, pack_weights=False)
    assert not machine(again)["packed_weights"]
    assert not any(type(part) is packing._PackedLinear for part in decoding_view(again.model).modules())
    assert not uses_packing(load_draft(again, str(tiny_folder)).model)

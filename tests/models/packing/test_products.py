"""Products by packed weights compared with torch's own, and the lifetime of packed copies."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from layerskip.models import packing
from layerskip.models.draft_head import OutputRows
from layerskip.models.packing import multiply, pack_like, pack_matrices, uses_packing
from tests.families import build
from tests.models.packing.layers import DTYPES, layer_of, needs_packing


def _assert_same(actual: Tensor, expected: Tensor, bias: bool = False) -> None:
    assert actual.dtype == expected.dtype
    if expected.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    elif bias:  # in some shapes torch rounds before it adds the bias
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7)
    else:
        assert torch.equal(actual, expected)  # bitwise, for any number of rows


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (5,), (1, 1), (2, 3), (1, 300), (0,), ()])
def test_products_equal_torchs(dtype: torch.dtype, bias: bool, rows: tuple[int, ...], packed: list[Tensor]) -> None:
    layer = layer_of(dtype, bias)
    pack_matrices(layer)
    hidden = torch.randn(*rows, 80).to(dtype)
    with torch.no_grad():
        _assert_same(multiply(hidden, layer.weight, layer.bias), linear(hidden, layer.weight, layer.bias), bias)
        every_other = torch.randn(*rows, 160).to(dtype)[..., ::2]  # not contiguous
        _assert_same(multiply(every_other, layer.weight, layer.bias), linear(every_other, layer.weight, layer.bias), bias)
    assert len(packed) == (packing._is_supported(dtype) and 0 not in rows)


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_any_width_equal_torchs(dtype: torch.dtype) -> None:
    for width in (1, 7, 33, 64, 576):
        layer = layer_of(dtype, False, width, 3 * width + 1)
        pack_matrices(layer)
        for rows in (1, 4, 17):
            hidden = torch.randn(rows, width).to(dtype)
            with torch.inference_mode():
                _assert_same(multiply(hidden, layer.weight), linear(hidden, layer.weight))


@needs_packing
def test_a_changed_weight_is_packed_again(packed: list[Tensor]) -> None:
    layer, hidden = layer_of(torch.float32, False), torch.randn(3, 80)
    pack_matrices(layer)

    def check() -> None:
        with torch.no_grad():
            for _ in range(2):
                _assert_same(multiply(hidden, layer.weight), linear(hidden, layer.weight))

    check()
    with torch.no_grad():
        layer.weight.mul_(2)
    check()
    layer.load_state_dict(layer_of(torch.float32, False).state_dict())
    check()
    layer.weight.data = torch.randn(112, 80)
    check()
    assert len(packed) == 4
    layer.to(torch.bfloat16)
    hidden = hidden.to(torch.bfloat16)
    check()


@needs_packing
@pytest.mark.parametrize("differentiated", ["hidden", "weight", "bias"])
def test_gradients_equal_torchs(differentiated: str, packed: list[Tensor]) -> None:
    layer, hidden = layer_of(torch.float32).requires_grad_(False), torch.randn(3, 80)
    pack_matrices(layer)
    leaf = {"hidden": hidden, "weight": layer.weight, "bias": layer.bias}[differentiated].requires_grad_()
    actual, expected = (
        torch.autograd.grad(product(hidden, layer.weight, layer.bias).square().sum(), leaf) for product in (multiply, linear)
    )
    torch.testing.assert_close(actual, expected)
    assert not packed
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert multiply(hidden, layer.weight).dtype == torch.bfloat16


@needs_packing
def test_copies_multiply_by_their_own_weights() -> None:
    hidden = torch.randn(1, 80)
    layer = pack_like(build("llama"), layer_of(torch.float32, False))
    with torch.no_grad():
        before = layer(hidden)
        for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            copied.weight.mul_(2)
            torch.testing.assert_close(copied(hidden), 2 * before)
        assert torch.equal(layer(hidden), before)


@needs_packing
def test_a_layer_with_a_replaced_forward_keeps_it() -> None:
    layer = layer_of(torch.float32)
    layer.forward = lambda hidden: hidden  # type: ignore[method-assign, assignment]
    assert pack_like(build("llama"), layer)(torch.ones(1, 80)).tolist() == [[1.0] * 80]


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_text_are_appended_to_packed_rows(dtype: torch.dtype, packed: list[Tensor]) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(300, 40).to(dtype), torch.randn(300).to(dtype)
    for offset in (None, bias):
        rows, hidden = OutputRows(weight, offset, torch.arange(0, 300, 3), 280, packed=True), torch.randn(2, 40).to(dtype)
        for text in ([], [1, 3, 5], [1, 3, 5, 290, 8]):
            rows.follow(text)
            with torch.inference_mode():
                _assert_same(rows.multiply(hidden), linear(hidden, weight, offset)[:, rows.tokens], offset is not None)


@needs_packing
def test_packed_copies_are_freed_with_their_weights() -> None:
    layer = layer_of(torch.float32)
    pack_matrices(layer)
    with torch.no_grad():
        multiply(torch.randn(1, 80), layer.weight)
    gc.collect()
    before = len(packing._packed)
    del layer
    gc.collect()
    assert len(packing._packed) == before - 1


@needs_packing
def test_small_weights_are_not_packed(monkeypatch: pytest.MonkeyPatch, packed: list[Tensor]) -> None:
    monkeypatch.setattr(packing, "_LEAST", {torch.float32: 80 * 112})
    small, large = layer_of(torch.float32, width=79), layer_of(torch.float32)
    tree = pack_like(large, nn.ModuleList([small, large]))
    with torch.no_grad():
        tree[0](torch.randn(1, 79))
        tree[1](torch.randn(1, 80))
    assert [id(weight) for weight in packed] == [id(large.weight)]
    assert not uses_packing(build("llama"))

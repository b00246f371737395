"""The kernels for weights of few bytes on a CPU, against torch in float64."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from layerskip.kernels import cpu
from layerskip.kernels.cpu import (
    MOST_ROWS,
    Blocks,
    BlockWeight,
    DecoderLayer,
    DecoderStack,
    FewRowsWeight,
    FloatWeight,
    HalfWeight,
    IntegerWeight,
    find_likeliest,
    has_kernels,
    time_parts,
)

pytestmark = pytest.mark.skipif(not has_kernels(), reason="needs a C++ compiler and AVX2 or AVX-512")


def weight(outputs: int, inputs: int) -> Tensor:
    """A float32 weight with values of bfloat16."""
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)).bfloat16().float()


def assert_multiplies(product: FewRowsWeight, matrix: Tensor) -> None:
    """Compare with float64, and rows with the same rows alone."""
    outputs, inputs = matrix.shape
    rows, bias = torch.randn(MOST_ROWS + 1, inputs), torch.randn(outputs)
    alone = torch.cat([product(row[None], bias) for row in rows])
    for count in range(1, MOST_ROWS + 2):
        found = product(rows[None, :count], bias)[0]
        expected = rows[:count].double() @ matrix.double().T + bias
        assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-4)
        assert count > MOST_ROWS or torch.equal(found, alone[:count])


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 33), (16, 8), (63, 100), (64, 576), (97, 31), (515, 3)])
@pytest.mark.usefixtures("threads")
def test_products_equal_torch_and_no_row_depends_on_others(outputs: int, inputs: int) -> None:
    matrix = weight(outputs, inputs)
    assert_multiplies(HalfWeight(matrix), matrix)
    assert_multiplies(FloatWeight(matrix / 3), matrix / 3)


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights have 12 bits, too, whatever is faster here."""
    monkeypatch.setattr(cpu, "_packed_rows", lambda threads: 1)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (7, 34), (63, 100), (64, 576), (515, 6)])
@pytest.mark.usefixtures("packs")
def test_values_of_12_bits_give_the_same_results_bit_by_bit(outputs: int, inputs: int, threads: int) -> None:
    matrix = weight(outputs, inputs) / 64
    product, rows = HalfWeight(matrix), torch.randn(MOST_ROWS, inputs)
    expected, found = rows.double() @ matrix.double().T, []
    for most in (0, 1, 5, MOST_ROWS):
        cpu._library().set_packed_rows(threads, most)
        found += [product(rows), torch.cat([product(row[None]) for row in rows])]
        found.append(torch.cat([product(rows[begin : begin + 5]) for begin in range(0, MOST_ROWS, 5)]))
    assert all(torch.equal(each, found[0]) for each in found)
    assert torch.allclose(found[0].double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("most", [0, MOST_ROWS])
@pytest.mark.usefixtures("packs")
def test_every_value_is_exact(most: int) -> None:
    """Also values whose exponents are not among the 16, and the smallest numbers; unit vectors read them one by one."""
    matrix = weight(97, 640) / 64
    matrix[:3, :2] = torch.tensor([[1e30, -1e-30], [2.0**-130, -(2.0**-126)], [0.0, 3e38]]).bfloat16().float()
    product, threads = HalfWeight(matrix), torch.get_num_threads()
    assert "packed" in product._kept and len(product._kept["listed"]) >= 4
    cpu._library().set_packed_rows(threads, most)
    columns = torch.cat([product(rows) for rows in torch.eye(640).split(20)])
    assert torch.equal(columns, matrix.T)


def test_weights_of_many_exponents_list_no_values() -> None:
    matrix = torch.exp2(torch.arange(64 * 64).view(64, 64) % 60 - 30.0)
    rows = torch.randn(3, 64)
    product = HalfWeight(matrix)
    assert product._kept.keys() == {"panels"}
    expected = torch.nn.functional.linear(rows, matrix)
    assert torch.allclose(product(rows), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_rows_are_measured_in_float32_on_the_processor_whatever_the_defaults_are() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert cpu._packed_rows.__wrapped__(2) in (0, *cpu._COUNTS)
            product = HalfWeight(torch.ones(4, 6, dtype=torch.float32, device="cpu"))
        assert all(part.device.type == "cpu" for part in product._kept.values())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("is_faster", [True, False])
def test_as_many_rows_read_12_bits_as_is_faster(is_faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, clock, chosen = 2, iter(range(10**6)), []
    library = cpu._library()

    class Library:
        panel_size = library.panel_size

        def set_packed_rows(self, threads: int, rows: int) -> None:
            chosen.append(rows)

        def multiply(self, rows: int, weight: int, results: int, count: int, threads: int) -> None:
            slow = count > 4 if chosen[-1] and is_faster else bool(chosen[-1])
            for _ in range(3 if slow else 1 if chosen[-1] else 2):
                next(clock)

    monkeypatch.setattr(cpu, "_library", Library)
    monkeypatch.setattr(cpu.time, "perf_counter", lambda: next(clock))
    assert cpu._packed_rows.__wrapped__(threads) == chosen[-1] == (4 if is_faster else 0)


@pytest.mark.parametrize(("outputs", "inputs", "block"), [(1, 16, 16), (63, 192, 32), (515, 96, 48)])
@pytest.mark.parametrize("most", [15, 255])  # the largest code
@pytest.mark.parametrize("halves", [True, False])  # whether float16 holds scales and offsets
@pytest.mark.usefixtures("threads")
def test_products_by_blocks_equal_torch(outputs: int, inputs: int, block: int, most: int, halves: bool) -> None:
    codes = torch.randint(most + 1, (outputs, inputs), dtype=torch.uint8)
    codes[0, 0] = most
    numbers = torch.randn(2, outputs, inputs // block).div(most)
    blocks = Blocks(codes, *(numbers.half().float() if halves else numbers))
    scales, offsets = (part.repeat_interleave(block, 1).double() for part in (blocks.scales, blocks.offsets))
    matrix = (codes * scales + offsets).float()
    assert torch.equal(blocks.values(), matrix)
    product = BlockWeight(matrix, blocks)
    assert product.block_bits == (16 if halves else 32)
    assert_multiplies(product, matrix)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (7, 33), (63, 192), (515, 96)])
@pytest.mark.parametrize("bits", [8, 4])
def test_products_in_integers_are_those_of_rounded_activations(outputs: int, inputs: int, bits: int) -> None:
    """The codes' products are sums of whole numbers; activations are rounded by at most half a step of 1/63."""
    matrix = weight(outputs, inputs)
    blocks = Blocks.quantize(matrix, bits)
    product, values = IntegerWeight(matrix, blocks), blocks.values().double()
    rows = torch.randn(MOST_ROWS + 1, inputs)
    rows[1] = 0
    alone = torch.cat([product(row[None]) for row in rows])
    block = math.gcd(inputs, 64)
    largest = rows.unflatten(1, (-1, block)).abs().amax(-1).repeat_interleave(block, 1).double()
    error = (largest * 0.51 / 63) @ values.abs().T
    assert bool(((alone.double() - rows.double() @ values.T).abs() <= error + 1e-5 * values.abs().amax()).all())
    assert not alone[1].any()
    for count in (2, 3, 5, MOST_ROWS):
        assert torch.equal(product(rows[None, :count])[0], alone[:count])


def test_the_largest_codes_do_not_overflow() -> None:
    """Sums of two products have 16 bits where the processor lacks VNNI."""
    matrix = torch.cat((torch.full((32, 63), 255.0), torch.zeros(32, 1)), 1)
    for bits in (8, 4):
        for sign in (1, -1):
            found = IntegerWeight(matrix, Blocks.quantize(matrix, bits))(torch.full((1, 64), float(sign)))
            assert torch.allclose(found, torch.full((1, 32), sign * 63 * 255.0), rtol=1e-3)


def _logits(matrix: Tensor, rows: Tensor, product: type[FewRowsWeight] = HalfWeight) -> tuple[Tensor, Tensor]:
    """Return all logits of rows that a layer leaves as they are, and those of which only the largest are exact."""
    size = matrix.shape[1]
    nothing = [HalfWeight(torch.zeros(size, size))] * 7
    norms: list[Any] = [None] * 5 + [(torch.ones(size), 1e-5), None]
    stack = DecoderStack([DecoderLayer(nothing, [None] * 4, norms, 1.0, size, 0, has_attention=False)], [None])
    positions, ending = (torch.zeros(1, len(rows), 2),) * 2, ((torch.ones(size), 1e-5), product(matrix), len(rows))
    found = [stack.logits(rows[None], positions, 0, None, *ending, only_largest=some)[1] for some in (False, True)]
    return found[0], found[1]


@pytest.mark.parametrize("kind", ["alike", "copies", "near copies", "outliers", "small", "zeros", "not finite"])
@pytest.mark.parametrize("product", [HalfWeight, FloatWeight])
@pytest.mark.usefixtures("threads")
def test_codes_of_8_bits_never_hide_the_largest_logit(
    kind: str, product: type[FewRowsWeight], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest of each row and its place are those of all logits, bit by bit."""
    monkeypatch.setattr(cpu, "_SCREENED", 1)
    for outputs, inputs in ((2000, 192), (515, 36), (3, 8)):
        matrix, rows = weight(outputs, inputs), torch.randn(MOST_ROWS, inputs)
        if kind == "copies":
            matrix = torch.cat((matrix[: (outputs + 1) // 2], matrix[: outputs // 2]))
        elif kind == "near copies":
            matrix[:] = matrix[0]
            matrix[:, 0] += torch.arange(outputs).flip(0) * 2**-9
            matrix = matrix.bfloat16().float()
        elif kind == "outliers":
            matrix[::7, 3], rows[::2, 5] = 300.0, 1e4
        elif kind == "small":
            matrix = (matrix * 1e-5).bfloat16().float()
        elif kind == "zeros":
            matrix[outputs % 2 :], rows[::3] = 0.0, 0.0
        elif kind == "not finite":
            matrix[1, 2], rows[0, 1], rows[1, 0], rows[2] = float("inf"), float("nan"), float("inf"), -float("inf")
        expected, found = _logits(matrix, rows, product)
        for wanted, value in zip(expected.max(-1), found.max(-1), strict=True):
            assert torch.allclose(wanted, value, rtol=0, atol=0, equal_nan=True)
        if kind == "alike" and outputs == 2000:
            assert (expected == found).float().mean() < 0.5  # most are not computed


_HEADS, _GROUPS, _HIDDEN, _INNER, _START, _CAPACITY, _EPSILON = 4, 2, 48, 72, 37, 70, 1e-5


def _normed(hidden: Tensor, scale: Tensor) -> Tensor:
    return hidden * (hidden.square().mean(-1, keepdim=True) + _EPSILON).rsqrt() * scale


def _rotated(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the first values ``[..., n, rotated]`` of heads."""
    size = cosine.shape[-1]
    turned, rest = states[..., :size], states[..., size:]
    low, high = turned.chunk(2, -1)
    return torch.cat((turned * cosine + torch.cat((-high, low), -1) * sine, rest), -1)


def _reference(
    weights: list[Tensor], norms: list[Any], hidden: Tensor, positions: Any, states: Any, seen: Tensor, width: int
) -> Tensor:
    """A decoder layer in float64, which writes keys and values."""
    count, (cosine, sine), (keys, values) = hidden.shape[0], positions, states
    q, k, v, o, gate, up, down = (weight.double() for weight in weights)
    of_q, of_k, _, first, after, second, last = norms
    states = _normed(hidden, first)
    query, key, value = ((states @ w.T).view(count, -1, width).transpose(0, 1) for w in (q, k, v))
    if of_q is not None:
        query, key = _normed(query, of_q), _normed(key, of_k)
    keys[:, _START : _START + count], values[:, _START : _START + count] = _rotated(key, cosine, sine), value
    scores = _rotated(query, cosine, sine) @ keys.repeat_interleave(_HEADS // _GROUPS, 0).transpose(1, 2) * 0.3
    share = scores[..., : _START + count].masked_fill(~seen, -float("inf")).softmax(-1)
    mixed = share @ values[:, : _START + count].repeat_interleave(_HEADS // _GROUPS, 0)
    update = mixed.transpose(0, 1).reshape(count, -1) @ o.T
    hidden = hidden + (update if after is None else _normed(update, after))
    states = _normed(hidden, second)
    update = (silu(states @ gate.T) * (states @ up.T)) @ down.T
    return hidden + (update if last is None else _normed(update, last))


@pytest.mark.parametrize("width", [4096, 4099, 49157])
@pytest.mark.usefixtures("threads")
def test_the_likeliest_of_a_row_is_the_first_of_the_largest_with_its_probability(width: int) -> None:
    infinite, rows = float("inf"), torch.randn(9, width) * 4
    rows[0, [7, width - 1]] = 30.0
    rows[1, width - 1] = 30.0
    rows[2, [5, 9]] = torch.tensor([infinite, float("nan")])
    rows[3, 6] = infinite
    rows[4] = -infinite
    rows[5, : width - 3] = -infinite
    rows[6] = 0.0
    found = find_likeliest(rows[None], with_probabilities=True)
    assert found is not None
    expected = rows.double().softmax(-1).max(-1)
    assert torch.equal(found[0][0], rows.max(-1).indices)
    assert torch.allclose(found[1][0].double(), expected.values, rtol=1e-4, atol=0, equal_nan=True)
    for row in range(len(rows)):
        alone = find_likeliest(rows[row : row + 1], with_probabilities=True)
        assert alone is not None
        assert all(
            torch.equal(one.nan_to_num(), all[0, row : row + 1].nan_to_num()) for one, all in zip(alone, found, strict=True)
        )


@pytest.mark.parametrize("width", [12, 64, 80, 128])
@pytest.mark.parametrize("sandwich", [False, True])
@pytest.mark.usefixtures("threads")
def test_a_layer_equals_its_formula_and_no_row_depends_on_others(width: int, sandwich: bool) -> None:
    """Rows see all positions before, a window of them, or those of a branch of a tree."""
    torch.manual_seed(width)
    count, rotated = 9, width // 4 * 2
    sizes = [(_HEADS * width, _HIDDEN), (_GROUPS * width, _HIDDEN), (_GROUPS * width, _HIDDEN), (_HIDDEN, _HEADS * width)]
    sizes += [(_INNER, _HIDDEN), (_INNER, _HIDDEN), (_HIDDEN, _INNER)]
    weights = [(torch.randn(size) / size[1] ** 0.5).bfloat16().float() for size in sizes]
    norms = [torch.rand(size) + 0.5 for size in (width, width, *[_HIDDEN] * 4)]
    used: list[Any] = [norm if sandwich or place in (2, 4) else None for place, norm in enumerate(norms)]
    used.insert(2, None)  # that of values
    both = [None if norm is None else (norm, _EPSILON) for norm in used]
    layer = DecoderLayer([HalfWeight(weight) for weight in weights], [None] * 4, both, 0.3, width, activation=0)
    hidden, angles = torch.randn(1, count, _HIDDEN), torch.randn(1, count, rotated)
    positions = angles.cos(), angles.sin()
    keys, values = torch.randn(2, 1, _GROUPS, _CAPACITY, width)
    seen = torch.ones(count, _START + count, dtype=torch.bool).tril(_START)
    seen[3:6, :20] = False  # windows
    seen[6:, _START + 2 : _START + 6] = False  # branches
    exact, exact_positions = (keys[0].double(), values[0].double()), [part[0].double() for part in positions]
    exact_norms = [None if norm is None else norm.double() for norm in used]
    expected = _reference(weights, exact_norms, hidden[0].double(), exact_positions, exact, seen, width)
    first = DecoderStack([layer], [(keys, values)])(hidden, positions, _START, seen[None, None])[0]
    found = first[0]
    assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-4)
    for written, wanted in zip((keys, values), exact, strict=True):
        assert torch.allclose(written[0].double(), wanted, rtol=1e-4, atol=1e-5)
    for row in range(count):
        one, end = slice(row, row + 1), _START + row + 1
        alone = hidden[:, one], (positions[0][:, one], positions[1][:, one]), end - 1, seen[None, None, one, :end]
        assert torch.equal(DecoderStack([layer], [(keys, values)])(*alone)[0][0, 0], found[row])
    others = torch.randn(2, 1, _GROUPS, _CAPACITY, width)
    copies = others.clone()
    (second,) = DecoderStack([layer], [tuple(copies)])(first, positions, _START, seen[None, None])
    together = DecoderStack([layer] * 2, [(keys, values), tuple(others)])(hidden, positions, _START, seen[None, None])
    assert torch.equal(together[0], first) and torch.equal(together[1], second)
    begun = time.perf_counter()
    with time_parts() as parts:
        again = DecoderStack([layer], [tuple(copies)])(first, positions, _START, seen[None, None])[0]
        elapsed, spent = time.perf_counter() - begun, parts()
    assert torch.equal(again, second)
    assert set(spent) == {"products", "attention", "other operators", "waiting at barriers"}
    assert 0 < sum(spent.values()) <= elapsed and spent["products"] > 0 and spent["attention"] > 0
    DecoderStack([layer], [tuple(copies)])(first, positions, _START, seen[None, None])
    assert parts() == spent  # the clock is off


def test_rows_of_a_transposed_view_and_only_values_of_bfloat16_fit() -> None:
    matrix, columns = weight(40, 24), torch.randn(24, 3)
    assert torch.allclose(HalfWeight(matrix)(columns.T), columns.T @ matrix.T, atol=1e-5)
    assert HalfWeight.fits(matrix)
    matrix[3, 3] = 1 + 2**-20
    assert not HalfWeight.fits(matrix)
    assert not HalfWeight.fits(weight(8, 8).bfloat16())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_stay_so(value: float) -> None:
    rows = torch.ones(2, 16)
    rows[0, 0] = value
    product = HalfWeight(weight(16, 16))(rows)
    assert not product[0].isfinite().any()
    assert product[1].isfinite().all()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("/no/compiler", "/no/compiler"), ("", "there is no C++ compiler; install g++"), ("/bin/false", "/bin/false fails:")],
)
def test_without_a_compiler_one_line_says_so(
    compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(cpu, "_library", cpu._library.__wrapped__)
    monkeypatch.setattr(cpu, "_SOURCE", Path(cpu.__file__))  # another source, which no earlier process has compiled
    with caplog.at_level(logging.WARNING):
        assert not has_kernels.__wrapped__()
    assert reason in caplog.text
    assert len(caplog.records) == 1


def test_what_was_compiled_is_loaded_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "_OPTIONS", tuple("-O0" if option == "-O3" else option for option in cpu._OPTIONS))
    cpu._library.__wrapped__()
    (file,) = (tmp_path / "layerskip").iterdir()
    monkeypatch.delattr(cpu, "_run")
    assert cpu._library.__wrapped__()._name == str(file)

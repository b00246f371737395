"""The kernels for weights of few bytes on a CPU, against torch in float64."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from layerskip.kernels import cpu
from layerskip.kernels.cpu import MOST_ROWS, Blocks, BlockWeight, FewRowsWeight, HalfWeight, has_kernels

pytestmark = pytest.mark.skipif(not has_kernels(), reason="needs a C++ compiler and AVX2, AVX-512 or NEON")


def weight(outputs: int, inputs: int) -> Tensor:
    """A float32 weight with values of bfloat16."""
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)).bfloat16().float()


def assert_multiplies(product: FewRowsWeight, matrix: Tensor, threads: int) -> None:
    """Compare with float64, and rows with the same rows alone."""
    outputs, inputs = matrix.shape
    rows, bias, before = torch.randn(MOST_ROWS + 1, inputs), torch.randn(outputs), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([product(row[None], bias) for row in rows])
        for count in range(1, MOST_ROWS + 2):
            found = product(rows[None, :count], bias)[0]
            expected = rows[:count].double() @ matrix.double().T + bias
            assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-4)
            assert count > MOST_ROWS or torch.equal(found, alone[:count])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 33), (16, 8), (63, 100), (64, 576), (97, 31), (515, 3)])
@pytest.mark.parametrize("threads", [1, 3])
def test_products_equal_torch_and_no_row_depends_on_others(outputs: int, inputs: int, threads: int) -> None:
    matrix = weight(outputs, inputs)
    assert_multiplies(HalfWeight(matrix), matrix, threads)


@pytest.mark.parametrize(("outputs", "inputs", "block"), [(1, 16, 16), (7, 32, 32), (63, 192, 32), (515, 96, 48)])
@pytest.mark.parametrize("most", [15, 255])  # the largest code
def test_products_by_blocks_equal_torch(outputs: int, inputs: int, block: int, most: int) -> None:
    codes = torch.randint(most + 1, (outputs, inputs), dtype=torch.uint8)
    codes[0, 0] = most
    blocks = Blocks(codes, *torch.randn(2, outputs, inputs // block).div(most))
    scales, offsets = (part.repeat_interleave(block, 1).double() for part in (blocks.scales, blocks.offsets))
    matrix = (codes * scales + offsets).float()
    assert torch.equal(blocks.values(), matrix)
    assert_multiplies(BlockWeight(matrix, blocks), matrix, threads=2)


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


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "/no/compiler")
    monkeypatch.setattr(cpu, "_library", cpu._library.__wrapped__)
    monkeypatch.setattr(cpu, "_SOURCE", Path(cpu.__file__))  # another source, which no earlier process has compiled
    with caplog.at_level(logging.WARNING):
        assert not has_kernels.__wrapped__()
    assert "/no/compiler" in caplog.text
    assert len(caplog.records) == 1


def test_what_was_compiled_is_loaded_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "_OPTIONS", tuple("-O0" if option == "-O3" else option for option in cpu._OPTIONS))
    cpu._library.__wrapped__()
    (file,) = (tmp_path / "layerskip").iterdir()
    monkeypatch.delattr(cpu, "_run")
    assert cpu._library.__wrapped__()._name == str(file)

"""The blocks of a GGUF file, by which linear layers multiply as they are in the file.

A GGUF file stores most weights as codes of 4 to 8 bits in blocks of 32 or 256 values. Transformers unpacks them, for some
families with rows in another order. So dense weights are matched with the file by their rows, whatever their names. Scales
and offsets are what ``gguf`` reads from the same blocks with the smallest and the largest codes. Blocks are kept only if
they give all values of the weight, bit by bit.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from layerskip.kernels.cpu import Blocks
from layerskip.models.packing import keep_blocks, offer_blocks

_PORTION = 4096  # rows that are compared at a time, in float64


class _Layout(NamedTuple):
    """The bytes of a block as in ggml's ``ggml-common.h``."""

    size: int
    codes: slice
    steps: int  # between the smallest and the largest code
    added: slice = slice(0)  # of a number that is added to the values
    group: int = 32  # values that share a scale
    lowest: int = 0  # bytes of the smallest and the largest code
    highest: int = 255


KINDS = {
    "Q4_0": _Layout(18, slice(2, 18), 15),
    "Q4_1": _Layout(20, slice(4, 20), 15, slice(2, 4)),
    "Q5_0": _Layout(22, slice(2, 22), 31),
    "Q5_1": _Layout(24, slice(4, 24), 31, slice(2, 4)),
    "Q8_0": _Layout(34, slice(2, 34), 255, lowest=128, highest=127),
    "Q4_K": _Layout(144, slice(16, 144), 15, slice(2, 4)),
    "Q5_K": _Layout(176, slice(16, 176), 31, slice(2, 4)),
    "Q6_K": _Layout(210, slice(0, 192), 63, group=16),
}
"""The layout of a block, by the name of a type of ggml."""


def keep_file_blocks(model: nn.Module, file: Path) -> tuple[int, int]:
    """Let a float32 model multiply by the blocks of its file; return how many weights are in blocks, and of how many."""
    weights, source, kept = _linear_weights(model), _File(file), 0
    for weight in weights:
        if (blocks := source.find(weight)) is not None:
            keep_blocks(weight, blocks)
            kept += 1
    return kept, len(weights)


def offer_file_blocks(model: nn.Module, file: Path, rounds: bool) -> None:
    """Let drafts of a float32 model read the blocks of its file; ``rounds`` if its weights were rounded to bfloat16."""
    source = _File(file, rounds)
    for weight in _linear_weights(model):
        offer_blocks(weight, source.find)


def _linear_weights(model: nn.Module) -> list[Tensor]:
    return list({id(layer.weight): layer.weight for layer in model.modules() if type(layer) is nn.Linear}.values())


class _File:
    """The tensors in blocks of a GGUF file, which are read when a weight of their shape is looked for.

    With ``rounds``, a weight has the values of the file rounded to bfloat16.
    """

    def __init__(self, file: Path, rounds: bool = False) -> None:
        self._file, self._rounds = file.resolve(), rounds
        self._state = self._now()
        self._read: dict[tuple[int, ...], list[tuple[Any, dict[int, int]]]] = {}

    def find(self, weight: Tensor, bits: int = 8) -> Blocks | None:
        """Return the blocks of a weight ``[out, in]`` with codes of at most some bits.

        None if it is not in the file in such blocks, or the file has changed since it was loaded.
        """
        keys = _hashes(weight.detach(), self._rounds)
        for tensor, rows in self._of_shape(tuple(weight.shape)):
            if keys[0] in rows and KINDS[tensor.tensor_type.name].steps < 2**bits:
                data = tensor.data[[rows.get(key, 0) for key in keys]]
                values = torch.from_numpy(_values(data, tensor.tensor_type)) if self._rounds else weight.detach()
                blocks = unpack(data, tensor.tensor_type, values)
                portions = torch.arange(len(values)).split(_PORTION)  # type: ignore[no-untyped-call]
                exact = all(torch.equal(blocks.take(part).values(), values[part]) for part in portions)
                if exact and torch.equal(_rounded(values, self._rounds), weight.detach()):
                    return blocks
        return None

    def _of_shape(self, shape: tuple[int, ...]) -> list[tuple[Any, dict[int, int]]]:
        """Return the tensors of a shape, each with its rows by hash."""
        if self._state != self._now():
            return []
        if shape not in self._read:
            self._read[shape] = [
                (tensor, {key: row for row, key in enumerate(_hashes(values, self._rounds))})
                for tensor in self._tensors
                if tensor.tensor_type.name in KINDS and shape == tuple(int(size) for size in reversed(tensor.shape))
                for values in [torch.from_numpy(_values(tensor.data, tensor.tensor_type))]
            ]
        return self._read[shape]

    @functools.cached_property
    def _tensors(self) -> list[Any]:
        from gguf import GGUFReader

        return list(GGUFReader(self._file).tensors)

    def _now(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            about = self._file.stat()
            return about.st_size, about.st_mtime_ns
        return None


def _hashes(values: Tensor, rounds: bool) -> list[int]:
    return [hash(row.tobytes()) for row in _rounded(values, rounds).numpy()]


def _rounded(values: Tensor, rounds: bool) -> Tensor:
    return values.bfloat16().float() if rounds else values


def _values(data: Any, kind: Any) -> Any:
    from gguf.quants import dequantize

    return dequantize(numpy.ascontiguousarray(data), kind)


def unpack(data: Any, kind: Any, values: Tensor) -> Blocks:
    """Return the blocks of rows with known values ``[out, in]``, given in bytes ``[out, n]`` of a type of ggml."""
    layout = KINDS[kind.name]

    def first_values(code: int, added: slice = slice(0)) -> Tensor:
        """Return the value of a code in every group, ``[out, groups]``, with zeros in the bytes ``added``."""
        changed = numpy.array(data).reshape(len(data), -1, layout.size)
        changed[..., layout.codes] = code
        changed[..., added] = 0
        found = torch.from_numpy(_values(changed.reshape(data.shape), kind))
        return found.view(len(found), -1, layout.group)[..., 0].contiguous()

    offsets = first_values(layout.lowest)
    scales = (first_values(layout.highest, layout.added) - first_values(layout.lowest, layout.added)) / layout.steps
    steps = (values.view(*scales.shape, layout.group) - offsets.unsqueeze(-1)) / scales.unsqueeze(-1)
    codes = steps.nan_to_num_(0.0).round_().clamp_(0, layout.steps)  # NaN where the scale is 0
    return Blocks(codes.flatten(1).to(torch.uint8), scales, offsets)

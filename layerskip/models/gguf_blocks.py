"""The blocks of a GGUF file, by which linear layers multiply as they are in the file.

A GGUF file stores most weights as codes of 4 to 8 bits in blocks of 32 or 256 values. Transformers unpacks them into dense
weights, for some families with rows in another order. Here every dense weight is matched with the file by its rows, so no
family and no name is known. Scales and offsets are values that the library ``gguf`` reads from the same blocks with the
smallest and the largest codes. Blocks are kept only if they give all values of the weight, bit by bit.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from layerskip.kernels.cpu import Blocks
from layerskip.models.packing import keep_blocks

_PORTION = 4096  # rows that are compared at a time, in float64


class _Layout(NamedTuple):
    """The bytes of a block as in ggml's ``ggml-common.h``: those of its codes, and of a number that is added to its values.

    ``lowest`` and ``highest`` are bytes of the smallest and the largest code, which are ``steps`` apart; ``group`` values
    share a scale.
    """

    size: int
    codes: slice
    steps: int
    added: slice = slice(0)
    group: int = 32
    lowest: int = 0
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
    """Let the linear layers of a float32 model multiply by the blocks of the file that it was loaded from.

    Return the number of weights that are in blocks now, and that of all linear layers' weights.
    """
    from gguf import GGUFReader

    tensors = defaultdict[tuple[int, ...], list[_FileTensor]](list)
    for tensor in GGUFReader(file).tensors:
        if tensor.tensor_type.name in KINDS and len(tensor.shape) == 2:
            tensors[tuple(int(size) for size in reversed(tensor.shape))].append(_FileTensor(tensor))
    weights = {id(layer.weight): layer.weight for layer in model.modules() if type(layer) is nn.Linear}
    kept = 0
    for weight in weights.values():
        found = (blocks for tensor in tensors[tuple(weight.shape)] if (blocks := tensor.blocks_of(weight)) is not None)
        if (blocks := next(found, None)) is not None:
            keep_blocks(weight, blocks)
            kept += 1
    return kept, len(weights)


class _FileTensor:
    """A matrix of a GGUF file, whose rows are found by their values."""

    def __init__(self, tensor: Any) -> None:
        self._data, self._type = tensor.data, tensor.tensor_type
        self._rows: dict[int, int] = {}  # by the hash of their first values, or of all where rows begin alike

    def blocks_of(self, weight: Tensor) -> Blocks | None:
        """Return the blocks of a weight ``[out, in]``; None if this tensor has other values."""
        for width in (KINDS[self._type.name].size, self._data.shape[1]) if not self._rows else ():
            values = _values(self._data[:, :width], self._type)
            self._rows, self._width = {key: number for number, key in enumerate(_hashes(values))}, values.shape[1]
            if len(self._rows) == len(values):
                break
        wanted = _hashes(weight.detach()[:, : self._width].contiguous().numpy())
        if wanted[0] not in self._rows:
            return None
        places = [self._rows.get(key, 0) for key in wanted]
        blocks = unpack(self._data[places], self._type, weight.detach())
        portions = torch.arange(len(weight)).split(_PORTION)  # type: ignore[no-untyped-call]
        return blocks if all(torch.equal(blocks.take(rows).values(), weight[rows]) for rows in portions) else None


def _hashes(rows: Any) -> list[int]:
    return [hash(row.tobytes()) for row in rows]


def _values(data: Any, kind: Any) -> Any:
    from gguf.quants import dequantize

    return dequantize(numpy.ascontiguousarray(data), kind)


def unpack(data: Any, kind: Any, values: Tensor) -> Blocks:
    """Return the blocks of rows with known values ``[out, in]``, given in bytes ``[out, n]`` of a type of ggml."""
    layout = KINDS[kind.name]

    def first_values(code: int, added: slice = slice(0)) -> Tensor:
        """Return the value of a code in every group, ``[out, groups]``, with zero as the number that is added to it."""
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

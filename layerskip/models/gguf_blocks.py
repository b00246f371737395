"""The blocks of a GGUF file, by which linear layers multiply as they are in the file.

A GGUF file stores most weights as codes of 4 to 8 bits in blocks of 32 or 256 values. Transformers unpacks them into dense
weights, for some families with rows in another order. Here every dense weight is matched with the file by its rows, so no
family and no name is known. Blocks are kept only if they give all values of the weight, bit by bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from layerskip.kernels.cpu import Blocks
from layerskip.models.packing import keep_blocks

_PORTION = 4096  # rows that are compared at a time, in float64


def keep_file_blocks(model: nn.Module, file: Path) -> tuple[int, int]:
    """Let the linear layers of a float32 model multiply by the blocks of the file that it was loaded from.

    Returns:
        The number of weights that are in blocks now, and that of all linear layers' weights.
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
        self._tensor = tensor
        self._rows: dict[int, int] = {}  # by the hash of their first values, or of all where rows begin alike

    def blocks_of(self, weight: Tensor) -> Blocks | None:
        """Return the blocks of a weight ``[out, in]``; None if this tensor has other values."""
        from gguf.quants import dequantize

        size, unpack = KINDS[self._tensor.tensor_type.name]
        data = self._tensor.data
        for width in (size, data.shape[1]) if not self._rows else ():
            values = dequantize(numpy.ascontiguousarray(data[:, :width]), self._tensor.tensor_type)
            self._rows, self._width = {key: number for number, key in enumerate(_hashes(values))}, values.shape[1]
            if len(self._rows) == len(values):
                break
        wanted = _hashes(weight.detach()[:, : self._width].contiguous().numpy())
        if wanted[0] not in self._rows:
            return None
        places = [self._rows.get(key, 0) for key in wanted]
        blocks = unpack(torch.from_numpy(numpy.array(data)).view(len(data), -1, size)).take(torch.tensor(places))
        portions = torch.arange(len(weight)).split(_PORTION)  # type: ignore[no-untyped-call]
        return blocks if all(torch.equal(blocks.take(rows).values(), weight[rows]) for rows in portions) else None


def _hashes(rows: Any) -> list[int]:
    return [hash(row.tobytes()) for row in rows]


# The layouts are those of ggml's ``ggml-common.h``. Unpackers take the bytes ``[out, blocks, size]``.


def _half(at: Tensor) -> Tensor:
    """Return numbers of float16, ``[..., 2]`` bytes each, as float32 ``[..., 1]``."""
    return at.contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, width: int) -> Tensor:
    """Return codes ``[..., 2 n]`` of bytes ``[..., n]``: of every ``width`` bytes the low halves, then the high ones."""
    groups = packed.reshape(*packed.shape[:-1], -1, width)
    return torch.stack((groups & 15, groups >> 4), -2).flatten(-3)


def _made(codes: Tensor, scales: Tensor, offsets: Tensor) -> Blocks:
    return Blocks(codes.flatten(1).contiguous(), scales.flatten(1).contiguous(), offsets.flatten(1).contiguous())


def _unpack_small(data: Tensor, bits: int, has_offset: bool) -> Blocks:
    """Unpack Q4_0, Q4_1, Q5_0 and Q5_1: blocks of 32 with a scale, and an offset or a code of zero in the middle."""
    at = 4 if has_offset else 2
    scales = _half(data[..., :2])
    offsets = _half(data[..., 2:4]) if has_offset else -scales * 2 ** (bits - 1)
    codes = _nibbles(data[..., -16:], 16)
    if bits == 5:
        high = data[..., at : at + 4].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)
        codes = codes | (high & 1).flatten(-2) << 4
    return _made(codes, scales, offsets)


def _unpack_q8_0(data: Tensor) -> Blocks:
    scales = _half(data[..., :2])
    return _made(data[..., 2:] ^ 128, scales, -128 * scales)  # two's complement as an offset binary


def _unpack_k(data: Tensor, bits: int) -> Blocks:
    """Unpack Q4_K and Q5_K: blocks of 256 with eight scales and offsets of 6 bits."""
    scale, offset = _half(data[..., :2]), _half(data[..., 2:4])
    low, high, mixed = data[..., 4:8], data[..., 8:12], data[..., 12:16]
    scales = torch.cat((low & 63, mixed & 15 | low >> 2 & 48), -1)
    offsets = torch.cat((high & 63, mixed >> 4 | high >> 2 & 48), -1)
    codes = _nibbles(data[..., -128:], 32)
    if bits == 5:
        upper = data[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
        codes = codes | (upper & 1).flatten(-2) << 4
    return _made(codes, scale * scales, -offset * offsets)


def _unpack_q6_k(data: Tensor) -> Blocks:
    """Unpack blocks of 256 with sixteen scales of 8 bits."""
    scales = _half(data[..., 208:]) * data[..., 192:208].contiguous().view(torch.int8)
    upper = data[..., 128:192].reshape(*data.shape[:-1], 2, 1, 32) >> torch.tensor(
        [0, 2, 4, 6], dtype=torch.uint8
    ).unsqueeze(-1)
    codes = _nibbles(data[..., :128], 64) | (upper & 3).flatten(-3) << 4
    return _made(codes, scales, -32 * scales)


KINDS: dict[str, tuple[int, Callable[[Tensor], Blocks]]] = {
    "Q4_0": (18, lambda data: _unpack_small(data, 4, has_offset=False)),
    "Q4_1": (20, lambda data: _unpack_small(data, 4, has_offset=True)),
    "Q5_0": (22, lambda data: _unpack_small(data, 5, has_offset=False)),
    "Q5_1": (24, lambda data: _unpack_small(data, 5, has_offset=True)),
    "Q8_0": (34, _unpack_q8_0),
    "Q4_K": (144, lambda data: _unpack_k(data, 4)),
    "Q5_K": (176, lambda data: _unpack_k(data, 5)),
    "Q6_K": (210, _unpack_q6_k),
}
"""Bytes of a block and its unpacker, by the name of a type of ggml."""

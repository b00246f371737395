"""The parts of a pass over a few rows on a CPU, with float32 activations and sums, and weights of as few bytes as hold them.

Decoding costs the bytes of the weights. A float32 weight whose values bfloat16 holds exactly is read at half the bytes, or
at 12 bits a value where that is faster. One whose values are codes in blocks of 32 takes 5 or 6 bits a value for codes of 4
bits, and 9 or 10 for larger ones. Products then differ from float32's only in the order of the sums, which is the same for
any number of rows. ``cpu.cpp`` is compiled at first use, within seconds, and kept for later processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from layerskip.device.trial import first_line, nearly_equal
from layerskip.files import atomic_write, digest

MOST_ROWS = 24
"""The most rows of one call. Then arithmetic takes longer than reading."""
_SPLIT_ROWS = 4 * MOST_ROWS  # up to which several calls are faster than torch's product of many rows
ROUNDED = 0.03
"""By which products of rounded activations may differ, as a share of the largest."""
_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = {
    "AVX2": ("-DLANES=8", "-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-DLANES=16", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
}
_OPTIONS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
_QUANTIZED = 64  # inputs that share a scale and an offset; not 32, which restores weights that came from such 4-bit blocks
_FITTED = 2**18  # values that are quantised at once, so that temporary copies stay in caches
_RANGES = (1.0, 0.85)  # the shares of a block's range from which scales and offsets are fitted
_STEPS = 3  # of each fit
_TOGETHER = 4  # inputs of a step in integers
_AT_ONCE = 64  # panels that are packed at once, because temporary copies take several times their memory
_MEASURED, _INPUTS = 2**26, 1024  # bytes and inputs of a weight that few caches hold
_COUNTS = (1, 2, 3, 4, 5, 6, 8, 12, 16, MOST_ROWS)  # rows that are measured with it
_REPEATS = 4  # measurements of each
_FASTER = 0.97  # the share of the time that counts as faster
_SCREENED = 2**22  # values of the smallest weight whose largest products are found by 8 bits
_ROOM = 64  # roundings of a product beside those of its sum
_WIDE = 4096  # logits of a row
_LISTED = 1e-3  # the largest share of the values that are listed
_LIMIT_SECONDS = 120  # for the compiler
PARTS = ("products", "attention", "other operators", "waiting at barriers")
"""The parts of the time of a pass."""
_NUMBERS = 8  # of a thread, as in `cpu.cpp`
_log = logging.getLogger(__name__)
_measuring = threading.Lock()


class FewRowsWeight(ctypes.Structure):
    """A float32 weight ``[outputs, inputs]`` for products of few rows: ``Weight`` of ``cpu.cpp``, at ``address``."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("panels", "blocks", "packed", "tables", "listed", "begins")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "block", "bits", "block_bits", "together")),
    ]

    def __init__(self, weight: Tensor, bits: int, block: int = 0, together: int = 1, **parts: Tensor) -> None:
        outputs, inputs = weight.shape
        block_bits = 8 * parts["blocks"].itemsize if "blocks" in parts else 0
        pointers = {name: part.data_ptr() for name, part in parts.items()}
        numbers = {"block": block or inputs, "bits": bits, "block_bits": block_bits, "together": together}
        super().__init__(**pointers, **numbers, inputs=inputs, outputs=outputs)
        self._weight, self._library, self._kept = weight.detach(), _library(), parts
        self.address = ctypes.addressof(self)

    @property
    def nbytes(self) -> int:
        """The bytes that it takes beside the weight."""
        return sum(part.nbytes for part in self._kept.values())

    @functools.cached_property
    def screen(self) -> Screen | None:
        """How the largest products are found by fewer bytes than all of them take; None where these are few."""
        if self.bits < 16 or self.inputs % _TOGETHER or self._weight.numel() < _SCREENED:
            return None
        found = Screen.of(self._weight)
        return found if found.codes.bits == 8 else None  # codes of nearly equal weights fit 4 bits

    def __deepcopy__(self, _: Any) -> FewRowsWeight:
        return self

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute :func:`torch.nn.functional.linear`, ``[..., in]`` to ``[..., out]``; gradients do not flow through it."""
        count = hidden.numel() // self.inputs
        if count > _SPLIT_ROWS or hidden.shape[-1] != self.inputs or hidden.device.type != "cpu":
            return linear(hidden, self._weight, bias)
        if count > MOST_ROWS:
            parts = [self(part, bias) for part in torch.split(hidden.reshape(count, -1), MOST_ROWS)]
            return torch.cat(parts).view(*hidden.shape[:-1], self.outputs)
        rows = hidden.contiguous()
        output = rows.new_empty((*hidden.shape[:-1], self.outputs))
        self._library.multiply(rows.data_ptr(), self.address, output.data_ptr(), count, _threads())
        return output if bias is None else output.add_(bias)


class HalfWeight(FewRowsWeight):
    """A weight whose values fit bfloat16, also at 12 bits each: sign, fraction, and which of 16 exponents.

    Exponents of trained weights have an entropy of less than 3 bits (DFloat11, arXiv 2504.11651). Numbers of one length are
    unpacked at the speed of the memory. The few values with other exponents are listed, so all values are exact.
    """

    def __init__(self, weight: Tensor) -> None:
        values = _panels(weight.detach().to(torch.bfloat16))  # [panels, outputs, in]
        values, parts = _without_listed(values) if weight.shape[1] % 2 == 0 else (values, {})
        # Listed values are added last also without 12 bits, so that results do not depend on what is faster.
        if parts and _packed_rows(_threads()):
            parts["packed"] = torch.cat([_packed(some, parts["tables"]) for some in torch.split(values, _AT_ONCE)])
        halves = values.view(values.shape[0], 2, -1, values.shape[2]).permute(0, 3, 2, 1)  # [panels, in, outputs, halves]
        super().__init__(weight, 16, panels=halves.contiguous(), **parts)

    @classmethod
    def fits(cls, weight: Tensor) -> bool:
        """Return whether bfloat16 holds the values of a weight, and this machine has the kernels."""
        if weight.dtype != torch.float32 or weight.device.type != "cpu" or not has_kernels():
            return False
        return not bool((weight.detach().view(torch.int32) & 0xFFFF).any())


class FloatWeight(FewRowsWeight):
    """A weight as it is, for products whose sums are the same for any number of rows."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight, 32, panels=_panels(weight.detach()).transpose(1, 2).contiguous())


def _without_listed(values: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return panels ``[panels, size, in]`` bfloat16 with zeros for values that are listed, and these with their exponents.

    Panels of which too many values would be listed are returned as they are.
    """
    counts = values.new_zeros(256, dtype=torch.int64)
    for some in torch.split(values, _AT_ONCE):
        counts += torch.bincount(_exponents(some).flatten(), minlength=256)
    counts[0] = values.numel() + 1  # that of zeros, which also stand for listed values
    chosen = counts.argsort(descending=True)[:16]
    is_known = values.new_zeros(256, dtype=torch.bool)
    is_known[chosen] = True
    is_listed = torch.cat([~is_known[_exponents(some).int()] for some in torch.split(values, _AT_ONCE)])
    found = is_listed.nonzero()  # panel by panel
    if len(found) > _LISTED * values.numel():
        return values, {}
    listed = torch.stack((found[:, 2], found[:, 1], values[is_listed].float().view(torch.int32)), 1).int()
    begins = torch.cat((found.new_zeros(1), torch.bincount(found[:, 0], minlength=len(values)).cumsum(0)))
    tables = torch.stack((chosen % 2 * 128, chosen // 2)).to(torch.uint8)
    return values.masked_fill(is_listed, 0), {"tables": tables, "listed": listed, "begins": begins}


def _exponents(values: Tensor) -> Tensor:
    return (values.view(torch.int16) >> 7 & 0xFF).to(torch.uint8)


def _packed(values: Tensor, tables: Tensor) -> Tensor:
    """Return panels ``[panels, size, in]`` bfloat16 in 12 bits; ``tables`` has all of their exponents."""
    places = tables.new_zeros(256)
    places[tables[0].int() // 128 + 2 * tables[1].int()] = torch.arange(16, dtype=torch.uint8, device=tables.device)
    words = values.view(torch.int16)
    rest = _paired((words >> 8 & 0x80 | words & 0x7F).to(torch.uint8))
    low, high = _paired(places[_exponents(values).int()]).chunk(2, 2)
    return torch.cat((rest, low | high << 4), 2)


def _paired(panels: Tensor) -> Tensor:
    """Return bytes ``[panels, size, in]`` as ``[panels, in / 2, 2 * size]``, as unpacking the bytes of vectors wants them.

    In every 16 bytes, the first 8 belong to the first of two inputs. Outputs i and i + size / 2 follow each other.
    """
    count, size, inputs = panels.shape
    pairs = panels.view(count, 2, size // 2, inputs // 2, 2).permute(0, 3, 4, 2, 1)  # [panels, pairs, input, output, half]
    return pairs.reshape(count, inputs // 2, 2, size // 8, 8).transpose(2, 3).reshape(count, inputs // 2, 2 * size)


@dataclass(frozen=True)
class Blocks:
    """A weight ``[out, in]`` as codes in blocks of consecutive inputs, whose values are ``code * scale + offset``."""

    codes: Tensor  # [out, in] uint8
    scales: Tensor  # [out, in / block] float32
    offsets: Tensor  # as scales

    @classmethod
    def quantize(cls, weight: Tensor, bits: int, importance: Tensor | None = None, steps: int = _STEPS) -> Blocks:
        """Return blocks of 64 inputs, or fewer where 64 do not divide them, whose codes of ``bits`` are the nearest ones.

        Scales and offsets are those of the range of each block, and of a narrower one, after ``steps`` of least squares; the
        better of both is kept. Without steps, they are those of the range. ``importance [in]``, positive, weighs squared
        errors by input. With the mean squares of the inputs, that is the diagonal of the Hessian of GPTQ (arXiv 2210.17323).
        """
        size = math.gcd(weight.shape[1], _QUANTIZED)
        factors = (weight.new_ones(weight.shape[1]) if importance is None else importance).float().view(-1, size)
        groups = weight.detach().float().view(weight.shape[0], -1, size)
        parts = torch.split(groups, max(1, _FITTED // weight.shape[1]))
        fits = [_better_fit(part, factors / factors.sum(1, keepdim=True), 2**bits - 1, steps) for part in parts]
        return cls(*(torch.cat(kind) for kind in zip(*fits, strict=True)))

    @property
    def has_half_scales(self) -> bool:
        """Whether all scales and offsets are numbers of float16."""
        return all(torch.equal(_in_half(part), part) for part in (self.scales, self.offsets))

    def take(self, rows: Tensor) -> Blocks:
        """Return some rows, which are given by their indices."""
        return Blocks(self.codes[rows], self.scales[rows], self.offsets[rows])

    def values(self) -> Tensor:
        """Return the weight in float32, each value rounded once."""
        scales, offsets = (part.double().unsqueeze(-1) for part in (self.scales, self.offsets))
        values: Tensor = self.codes.reshape(*self.scales.shape, -1) * scales + offsets
        return values.flatten(1).float()


def _better_fit(groups: Tensor, factors: Tensor, largest: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes ``[rows, in]``, scales and offsets of groups ``[rows, n, size]``; ``factors [n, size]`` sum up to 1."""
    (low, high), means = groups.aminmax(dim=-1), (groups * factors).sum(-1)
    centred = groups - means.unsqueeze(-1)
    best: tuple[Tensor, ...] = ()
    for share in _RANGES if steps else _RANGES[:1]:
        scales, offsets = _in_half((high - low) * (share / largest)), _in_half((low + high - (high - low) * share) / 2)
        for step in range(steps + 1):
            # Numbers of float16 are read at half the bytes.
            scales.clamp_min_(torch.finfo(torch.float16).smallest_normal)
            codes = ((groups - offsets.unsqueeze(-1)) / scales.unsqueeze(-1)).round_().clamp_(0, largest)
            if step < steps:
                middles = (codes * factors).sum(-1)
                distances = codes - middles.unsqueeze(-1)  # centred, because one input may have nearly all of the importance
                weighted = distances * factors
                squares = (weighted * distances).sum(-1)
                scales = _in_half(torch.where(squares > 0, (weighted * centred).sum(-1) / squares, scales))
                offsets = _in_half(means - scales * middles)
        errors = ((codes * scales.unsqueeze(-1) + offsets.unsqueeze(-1) - groups).square_() * factors).sum(-1)
        found = codes, scales.unsqueeze(-1), offsets.unsqueeze(-1), errors.unsqueeze(-1)
        best = tuple(torch.where(found[3] < best[3], *pair) for pair in zip(found, best, strict=True)) if best else found
    codes, scales, offsets, _ = best
    return codes.flatten(1).to(torch.uint8), scales.squeeze(-1), offsets.squeeze(-1)


def _in_half(values: Tensor) -> Tensor:
    return values.half().float()


class BlockWeight(FewRowsWeight):
    """A weight in blocks; ``weight`` has the same values in float32. ``together`` codes of an output lie side by side."""

    def __init__(self, weight: Tensor, blocks: Blocks, together: int = 1) -> None:
        codes, bits = _panels(blocks.codes), 8
        codes = codes.view(*codes.shape[:2], -1, together).transpose(1, 2)  # [panels, in / together, outputs, together]
        if int(blocks.codes.max()) < 16:
            low, high = codes.chunk(2, 2)
            codes, bits = low | high << 4, 4
        scales = torch.stack([_panels(part).transpose(1, 2) for part in (blocks.scales, blocks.offsets)], 2).contiguous()
        if blocks.has_half_scales:
            scales = scales.half()
        block = weight.shape[1] // scales.shape[1]
        super().__init__(weight, bits, block, together, panels=codes.contiguous(), blocks=scales)


class IntegerWeight(BlockWeight):
    """A weight in blocks of at most 8 bits that is multiplied in integers.

    Activations are rounded to 8 bits in the blocks of the weight, or to 7 where they meet codes of 8 bits without VNNI. So
    results are those of a draft, and only near those of ``weight``.
    """

    def __init__(self, weight: Tensor, blocks: Blocks) -> None:
        block = weight.shape[1] // blocks.scales.shape[1]
        super().__init__(weight, blocks, 1 if block % _TOGETHER else _TOGETHER)

    @staticmethod
    def bytes_for(weight: Tensor, bits: int, block: int = _QUANTIZED) -> int:
        """Return the bytes that one of a weight takes with codes of 4 or 8 bits, and numbers of float16 for each block."""
        outputs, inputs = weight.shape
        padded = outputs + -outputs % _library().panel_size()
        return int(padded * (inputs * bits // 8 + 4 * (inputs // math.gcd(inputs, block))))

    def __call__(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute as few rows are computed, however many there are: a scan replays drafts."""
        if hidden.numel() <= MOST_ROWS * self.inputs:
            return super().__call__(hidden, bias)
        parts = torch.split(hidden.reshape(-1, hidden.shape[-1]), MOST_ROWS)
        output = torch.cat([super(IntegerWeight, self).__call__(rows, bias) for rows in parts])
        return output.view(*hidden.shape[:-1], self.outputs)


@dataclass(frozen=True)
class Screen:
    """Codes of 8 bits that show which products of a weight ``[out, in]`` may be the largest of a row.

    Only those are computed by the weight itself. By the inequality of Cauchy and Schwarz, no larger one is missed.
    """

    codes: IntegerWeight
    distances: Tensor  # [panels, 2, outputs] float32: |w - v| and |v| of outputs with weights w and codes v

    @classmethod
    def of(cls, weight: Tensor) -> Screen:
        """Return the screen of a weight."""
        size, rest = _library().panel_size(), (weight.shape[1] + _ROOM) * torch.finfo(torch.float32).eps
        found, parts = list[Blocks](), list[Tensor]()
        for rows in torch.split(weight.detach(), max(size, _FITTED // weight.shape[1])):
            blocks = Blocks.quantize(rows, 8, steps=0)
            values, offsets = blocks.values(), blocks.offsets.norm(dim=1) * (rows.shape[1] // blocks.offsets.shape[1]) ** 0.5
            lengths = values.norm(dim=1)
            rounded = rest * (lengths + 2 * offsets)  # sums of codes and of offsets are rounded one by one
            parts.append(torch.stack(((rows - values).norm(dim=1) + rounded, lengths), 1))
            found.append(blocks)
        whole = Blocks(*(torch.cat([getattr(each, name) for each in found]) for name in ("codes", "scales", "offsets")))
        return cls(IntegerWeight(weight, whole), _panels(torch.cat(parts)).transpose(1, 2).contiguous())


def _threads() -> int:
    """Return the number of threads, for which it is known how many rows read 12 bits."""
    threads = torch.get_num_threads()
    with _measuring:
        _packed_rows(threads)
    return threads


@functools.cache
def _packed_rows(threads: int) -> int:
    """Return the most rows for which 12 bits are faster than 16, with a number of threads; results are the same."""
    library, size = _library(), _library().panel_size()
    outputs = _MEASURED // (2 * _INPUTS) // size * size
    panels, tables = (torch.zeros(count, dtype=torch.uint8, device="cpu") for count in (_MEASURED, 32))
    rows, results = (torch.zeros(max(_COUNTS) * n, dtype=torch.float32, device="cpu") for n in (_INPUTS, outputs))
    shape = torch.empty(outputs, _INPUTS, device="meta")
    weight = FewRowsWeight(shape, 16, panels=panels, packed=panels, tables=tables)
    best = 0
    for count in _COUNTS:
        seconds = {0: math.inf, count: math.inf}
        for most in (0, count) * _REPEATS:
            library.set_packed_rows(threads, most)
            start = time.perf_counter()
            library.multiply(rows.data_ptr(), weight.address, results.data_ptr(), count, threads)
            seconds[most] = min(seconds[most], time.perf_counter() - start)
        if seconds[count] > _FASTER * seconds[0]:
            break
        best = count
    library.set_packed_rows(threads, best)
    _log.debug("with %d threads, up to %d rows read weights of 12 bits", threads, best)
    return best


def _panels(rows: Tensor) -> Tensor:
    """Return ``[out, n]`` as panels ``[out / size, size, n]``; zeros fill the last one."""
    size = _library().panel_size()
    missing = -rows.shape[0] % size
    padded = torch.cat((rows, rows.new_zeros(missing, rows.shape[1]))) if missing else rows
    return padded.view(-1, size, rows.shape[1])


def normalise(hidden: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    """Return the root-mean-square norm (arXiv 1910.07467) of ``hidden [..., H]``, times ``scale [H]``; both float32."""
    rows = hidden.contiguous()
    output = torch.empty_like(rows)
    width = scale.shape[0]
    _library().normalise(rows.data_ptr(), scale.data_ptr(), output.data_ptr(), rows.numel() // width, width, epsilon)
    return output


def find_likeliest(logits: Tensor, with_probabilities: bool = False) -> tuple[Tensor, Tensor] | None:
    """Return the place of the largest of each row of logits ``[..., V]`` float32, the first of several, and its probability.

    They are ``[...]``, int64 and float32; probabilities are undefined unless asked for, and NaN where the largest is not
    finite. None where torch is as fast: on other devices, and for few logits.
    """
    width = logits.shape[-1]
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or width < _WIDE or not has_kernels():
        return None
    rows = logits.detach().contiguous()
    places, found = rows.new_empty(rows.shape[:-1], dtype=torch.int64), rows.new_empty(rows.shape[:-1])
    probabilities = found.data_ptr() if with_probabilities else None
    threads = torch.get_num_threads()
    _library().find_likeliest(rows.data_ptr(), places.numel(), width, places.data_ptr(), probabilities, threads)
    return places, found


class DecoderLayer(ctypes.Structure):
    """A decoder layer for :class:`DecoderStack`: ``Layer`` of ``cpu.cpp``.

    Args:
        weights: of queries, keys, values, attention's output, gate, up and down.
        biases: of the first four, or None.
        norms: of queries, keys and values, before attention, after it, before the MLP and after it: factors ``[width]`` or
            ``[H]`` and the number that is added to the mean of the squares; None without such a norm.
        scale: of the scores of attention.
        width: that of a head.
        activation: its place in :data:`~layerskip.kernels.few_rows_linear.GATES`.
        has_attention, has_mlp: False if it is skipped; not both are.
    """

    _fields_: ClassVar = [
        ("weights", ctypes.c_void_p * 7),
        ("biases", ctypes.c_void_p * 4),
        ("norms", ctypes.c_void_p * 7),
        ("epsilons", ctypes.c_float * 7),
        ("scale", ctypes.c_float),
        ("width", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("activation", "has_attention", "has_mlp")),
    ]

    def __init__(
        self,
        weights: Sequence[FewRowsWeight],
        biases: Sequence[Tensor | None],
        norms: Sequence[tuple[Tensor, float] | None],
        scale: float,
        width: int,
        activation: int,
        has_attention: bool = True,
        has_mlp: bool = True,
    ) -> None:
        factors, epsilons = zip(*(norm or (None, 0.0) for norm in norms), strict=True)
        addresses = (ctypes.c_void_p * 7)(*(weight.address for weight in weights))
        arrays = addresses, _pointers(biases), _pointers(factors), (ctypes.c_float * 7)(*epsilons)
        super().__init__(*arrays, scale, width, activation, has_attention, has_mlp)
        self._kept = weights, biases, factors
        self.shape = width, *(weight.outputs for weight in weights)  # one for all layers of a call
        self.rounds = any(isinstance(weight, IntegerWeight) for weight in weights)


class DecoderStack:
    """Decoder layers of one shape, one after the other; a pass over a few rows is one call.

    ``buffers`` are keys and values of each layer, ``[1, key heads, capacity, width]`` float32, which their owner keeps; None
    without attention.
    """

    def __init__(self, layers: Sequence[DecoderLayer], buffers: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        self.layers, (keys, values) = tuple(layers), zip(*(pair or (None, None) for pair in buffers), strict=True)
        self._capacity = next((each.shape[2] for each in keys if each is not None), 0)
        self._addresses = (ctypes.c_void_p * len(layers))(*map(ctypes.addressof, layers))
        self._keys, self._values, self._decode = _pointers(keys), _pointers(values), _library().decode

    def __call__(self, hidden: Tensor, positions: tuple[Tensor, Tensor], start: int, seen: Tensor | None) -> Tensor:
        """Return the hidden states ``[layers, 1, n, H]`` after each layer; write keys and values after ``start`` positions.

        Args:
            hidden: ``[1, n, H]`` float32, before the first layer.
            positions: cosine and sine, ``[1, n, rotated]`` float32.
            start: the number of positions before.
            seen: ``[1, 1, n, start + n]`` bool, the positions that each row sees; None if a single row sees all.
        """
        return self._run(hidden, positions, start, seen, None, 0.0, None, None, None, 0, None, None)

    def logits(
        self,
        hidden: Tensor,
        positions: tuple[Tensor, Tensor],
        start: int,
        seen: Tensor | None,
        norm: tuple[Tensor, float],
        output: FewRowsWeight,
        last: int,
        only_largest: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states ``[n, H]`` after all layers and a norm, and the logits ``[last, V]`` of the last ones.

        Args:
            norm: its factors ``[H]`` float32, and the number that is added to the mean of the squares.
            output: the weight ``[V, H]`` of the output layer. Other arguments are those of a call.
            only_largest: whether other logits than the largest of each row, all of them if there are several, may be smaller
                or greater than they are, but below it.
        """
        states, logits = hidden.new_empty(hidden.shape[1:]), hidden.new_empty(last, output.outputs)
        screen = output.screen if only_largest else None
        found = (None, None) if screen is None else (screen.codes.address, screen.distances.data_ptr())
        ending = norm[0].data_ptr(), norm[1], output.address, states.data_ptr(), logits.data_ptr(), last
        self._run(hidden, positions, start, seen, *ending, *found)
        return states, logits

    def _run(
        self, hidden: Tensor, positions: tuple[Tensor, Tensor], start: int, seen: Tensor | None, *ending: Any
    ) -> Tensor:
        rows, (cosine, sine) = hidden.contiguous(), (part.contiguous() for part in positions)
        outputs = rows.new_empty((len(self.layers), *rows.shape))
        self._decode(
            self._addresses,
            len(self.layers),
            rows.data_ptr(),
            outputs.data_ptr(),
            cosine.data_ptr(),
            sine.data_ptr(),
            self._keys,
            self._values,
            None if seen is None else seen.data_ptr(),
            rows.shape[1],
            cosine.shape[2],
            start,
            self._capacity,
            0 if seen is None else seen.stride(2),
            _threads(),
            *ending,
        )
        return outputs


@contextlib.contextmanager
def time_parts() -> Iterator[Callable[[], dict[str, float]]]:
    """Let the kernels take the time; yield a function that returns seconds by part, the mean of all threads."""
    seconds = torch.zeros(torch.get_num_threads(), _NUMBERS, dtype=torch.float64, device="cpu")
    _library().set_clock(seconds.data_ptr())
    try:
        yield lambda: dict(zip(PARTS, seconds.mean(0).tolist(), strict=False))
    finally:
        _library().set_clock(None)


def _pointers(tensors: Sequence[Tensor | None]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))


@functools.cache
def has_kernels() -> bool:
    """Return whether the kernels compile here, and multiply as torch does. Otherwise the log says why, once."""
    if _instruction_set() is None:
        return False
    try:
        source = torch.Generator().manual_seed(0)
        weight, rows = (torch.randn(size, 64, generator=source, device="cpu") for size in (70, 9))
        codes = torch.randint(16, (70, 64), generator=source, device="cpu", dtype=torch.uint8)
        numbers = weight[:, :4].half().float(), weight[:, :4]  # float16 holds the first
        blocks = [Blocks(codes * f, some[:, :2], some[:, 2:]) for f, some in zip((1, 17), numbers, strict=True)]
        products = [
            HalfWeight(weight.bfloat16().float()),
            FloatWeight(weight),
            *(BlockWeight(some.values(), some) for some in blocks),
        ]
        works = all(nearly_equal(product(rows), linear(rows, product._weight)) for product in products)
        quantized = [Blocks.quantize(weight, bits) for bits in (8, 4)]
        integers = [(IntegerWeight(weight, found)(rows), found.values()) for found in quantized]
        works &= all(nearly_equal(found, linear(rows, values), ROUNDED) for found, values in integers)
        works &= _has_same_results(products[0], rows)
        reason = "" if works else "they give other results"
    except Exception as error:  # compilers, folders and loaders fail in many ways
        reason = first_line(error)
    if reason:
        _log.warning("the kernels for weights of few bytes cannot be used, so products read float32: %s", reason)
    return not reason


def _has_same_results(product: FewRowsWeight, rows: Tensor) -> bool:
    """Return whether a product gives the same results, bit by bit, whether it reads 16 bits or 12."""
    threads, found = _threads(), []
    for most in (0, MOST_ROWS):
        _library().set_packed_rows(threads, most)
        found.append(product(rows))
    _library().set_packed_rows(threads, _packed_rows(threads))
    return torch.equal(*found)


def processor_flags() -> set[str]:
    """Return the names that Linux has for what the processor can do; empty elsewhere."""
    try:
        return set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return set()


def _instruction_set() -> str | None:
    capability = torch.backends.cpu.get_cpu_capability()
    return capability if platform.machine() == "x86_64" and capability in _FLAGS else None


@functools.cache
def _library() -> Any:
    """Return the compiled library; ``OSError`` or ``SubprocessError`` if it cannot be compiled in time, or loaded."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("c++") or ""]
    if not compiler[0]:
        raise OSError("there is no C++ compiler; install g++")
    # Torch's own OpenMP: the threads of another one would wait for the same cores.
    openmp = next((Path(torch.__file__).parent / "lib").glob("libgomp*"), None)
    runtime = [str(openmp)] if openmp else ["-fopenmp"]
    vnni = ["-mavx512vnni"] if _instruction_set() == "AVX512" and "avx512_vnni" in processor_flags() else []
    compile_source = [*compiler, *_OPTIONS, *_FLAGS[_instruction_set() or ""], *vnni]
    identity = digest([compile_source, runtime, torch.__version__, _SOURCE.read_text(encoding="utf-8")])[:16]
    path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "layerskip" / f"cpu-{identity}.so"
    if path.is_file():
        library = ctypes.CDLL(str(path))
    else:
        with tempfile.TemporaryDirectory() as work:
            compiled, linked = f"{work}/cpu.o", f"{work}/cpu.so"
            _run([*compile_source, "-c", str(_SOURCE), "-o", compiled])
            _run([*compiler, "-shared", compiled, *runtime, "-o", linked])
            library = ctypes.CDLL(linked)
            # A folder that cannot be written costs later processes the seconds of compiling.
            with contextlib.suppress(OSError), atomic_write(path, str(os.getpid())) as partial:
                shutil.copy(linked, partial)
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    for name, arguments in {
        "set_packed_rows": [number] * 2,
        "set_clock": [pointer],
        "multiply": [pointer] * 3 + [size, number],
        "find_likeliest": [pointer, size, size, pointer, pointer, number],
        "normalise": [pointer] * 3 + [size] * 2 + [ctypes.c_float],
        "decode": [pointer, size, *[pointer] * 7, *[size] * 5, number, pointer, ctypes.c_float, *[pointer] * 3, size]
        + [pointer] * 2,
    }.items():
        getattr(library, name).argtypes, getattr(library, name).restype = arguments, None
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
    if done.returncode:
        raise OSError(f"{command[0]} fails: {done.stderr.strip()}")

"""Masks: the sub-layers that a draft pass skips.

A mask has one flag per attention and one per MLP sub-layer. Both are skipped independently, as in Draft & Verify: Lossless
Large Language Model Acceleration via Self-Speculative Decoding (arXiv 2309.08168), section 3.2. Configurations and exports
use its text form::

    attention:6,7-9;mlp:2        attention of layers 6 to 9, and the MLP of layer 2
    layers:4-14                  both sub-layers of layers 4 to 14
    layers:4-14;mlp:20           both forms combined

This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass

_PARTS = {"attention": ("attention",), "mlp": ("mlp",), "layers": ("attention", "mlp")}
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_LARGEST_LAYER = 9999  # so that a typing error such as 4-99999999 does not fill the memory


class MaskError(ValueError):
    """A mask that is malformed or does not fit its model."""


@dataclass(frozen=True)
class SkipMask:
    """One flag per sub-layer of every decoder layer; True means skipped."""

    attention: tuple[bool, ...]
    mlp: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.attention) != len(self.mlp):
            raise MaskError(f"mask: {len(self.attention)} attention flags, but {len(self.mlp)} MLP flags")

    @classmethod
    def none(cls, layers: int) -> SkipMask:
        """Return the mask for ``layers`` layers that skips nothing."""
        return cls((False,) * layers, (False,) * layers)

    @classmethod
    def of(cls, layers: int, attention: Set[int], mlp: Set[int]) -> SkipMask:
        """Return the mask for ``layers`` layers that skips the given attention and MLP sub-layers, counted from 0."""
        for kind, chosen in (("attention", attention), ("mlp", mlp)):
            outside = sorted(index for index in chosen if not 0 <= index < layers)
            if outside:
                raise MaskError(f"mask: {kind} layer {outside[0]} is out of range; the model has layers 0 to {layers - 1}")
        return cls(tuple(i in attention for i in range(layers)), tuple(i in mlp for i in range(layers)))

    @classmethod
    def parse(cls, text: str, layers: int) -> SkipMask:
        """Parse the text form for a model of ``layers`` layers; a ``MaskError`` if it does not fit."""
        return cls.of(layers, *sublayers(text))

    @property
    def layers(self) -> int:
        """The number of decoder layers of the model."""
        return len(self.attention)

    @property
    def is_whole_layers(self) -> bool:
        """True if sub-layers are skipped in whole layers only."""
        return self.attention == self.mlp

    def format(self) -> str:
        """Return the canonical, shortest text form; the inverse of :meth:`parse`."""
        return _write(*({i for i, skip in enumerate(flags) if skip} for flags in (self.attention, self.mlp)))


def normalise(text: str) -> str:
    """Return the canonical form of a mask's text, without the number of layers; a ``MaskError`` if it is malformed."""
    return _write(*sublayers(text))


def sublayers(text: str) -> tuple[set[int], set[int]]:
    """Return the layers whose attention and whose MLP a mask's text skips; a ``MaskError`` if it is malformed."""
    skipped: dict[str, set[int]] = {"attention": set(), "mlp": set()}
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        kind, _, numbers = part.partition(":")
        if kind.strip() not in _PARTS:
            raise MaskError(f"mask: cannot read {part!r}; write 'attention:6,7-9;mlp:2' or 'layers:4-14', joined by ';'")
        for name in _PARTS[kind.strip()]:
            skipped[name] |= _read_numbers(numbers, part)
    return skipped["attention"], skipped["mlp"]


def _read_numbers(numbers: str, part: str) -> set[int]:
    chosen: set[int] = set()
    for piece in numbers.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise MaskError(f"mask: cannot read {piece.strip()!r} in {part!r}; layers are written as 6 or 7-9")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last > _LARGEST_LAYER:
            raise MaskError(f"mask: {piece.strip()!r} in {part!r} is not a range of layers")
        chosen.update(range(first, last + 1))
    return chosen


def _write(attention: set[int], mlp: set[int]) -> str:
    both = attention & mlp
    parts = (("layers", both), ("attention", attention - both), ("mlp", mlp - both))
    return ";".join(f"{kind}:{_write_numbers(chosen)}" for kind, chosen in parts if chosen)


def _write_numbers(chosen: set[int]) -> str:
    runs: list[list[int]] = []
    for index in sorted(chosen):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

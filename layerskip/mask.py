"""Which sub-layers does a draft pass skip?

A mask is a value: one flag per attention and one per MLP sub-layer, True meaning skipped. Attention and MLP are
skipped independently, as in Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
Decoding (arXiv 2309.08168), section 3.2. Its text form is what configurations, exports and people use::

    attention:6,7-9;mlp:2        attention of layers 6 to 9, and the MLP of layer 2
    layers:4-14                  both sub-layers of layers 4 to 14
    layers:4-14;mlp:20           both forms together

No torch in here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PARTS = ("attention", "mlp", "layers")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_LARGEST_LAYER = 9999  # keeps a typing slip such as 4-99999999 from filling the memory


class MaskError(ValueError):
    """A mask that cannot be read, or that does not fit the model it is meant for."""


@dataclass(frozen=True)
class Gap:
    """A hole that a mask leaves: a contiguous run of whole layers, or one sub-layer.

    Args:
        kind: ``layers``, ``attention`` or ``mlp``.
        first: its first layer.
        last: its last one.
    """

    kind: str
    first: int
    last: int

    @property
    def name(self) -> str:
        """What it is called in files: ``layers_2_16``, ``mlp_20_20``."""
        return f"{self.kind}_{self.first}_{self.last}"


@dataclass(frozen=True)
class SkipMask:
    """One flag per sub-layer; True means that the draft skips it.

    Args:
        attention: one flag per decoder layer for its attention sub-layer.
        mlp: one flag per decoder layer for its MLP sub-layer; as many as ``attention``.
    """

    attention: tuple[bool, ...]
    mlp: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.attention) != len(self.mlp):
            raise MaskError(f"mask: {len(self.attention)} attention flags, but {len(self.mlp)} MLP flags")

    @classmethod
    def none(cls, layers: int) -> SkipMask:
        """The mask of ``layers`` layers that skips nothing."""
        return cls((False,) * layers, (False,) * layers)

    @classmethod
    def of(cls, layers: int, attention: set[int] | frozenset[int], mlp: set[int] | frozenset[int]) -> SkipMask:
        """The mask of ``layers`` layers that skips the given attention and MLP sub-layers, counted from 0.

        Raises:
            MaskError: a layer does not exist in a model of ``layers`` layers.
        """
        for kind, chosen in (("attention", attention), ("mlp", mlp)):
            outside = sorted(index for index in chosen if not 0 <= index < layers)
            if outside:
                raise MaskError(f"mask: {kind} layer {outside[0]} is out of range; the model has layers 0 to {layers - 1}")
        return cls(tuple(i in attention for i in range(layers)), tuple(i in mlp for i in range(layers)))

    @classmethod
    def parse(cls, text: str, layers: int) -> SkipMask:
        """Read the text form for a model of ``layers`` layers.

        Raises:
            MaskError: the text is malformed, or names a layer that the model does not have.
        """
        return cls.of(layers, *_read(text))

    @property
    def layers(self) -> int:
        """How many decoder layers the mask is for."""
        return len(self.attention)

    @property
    def skipped(self) -> int:
        """How many sub-layers are skipped, of ``2 * layers``."""
        return sum(self.attention) + sum(self.mlp)

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What is skipped, in the order in which a pass comes to it: runs of whole layers, and single sub-layers."""
        found: list[Gap] = []
        for layer, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            if not (attention and mlp):
                kinds = ["attention"] * attention + ["mlp"] * mlp
                found += [Gap(kind, layer, layer) for kind in kinds]
            elif found and found[-1].kind == "layers" and found[-1].last == layer - 1:
                found[-1] = Gap("layers", found[-1].first, layer)
            else:
                found.append(Gap("layers", layer, layer))
        return tuple(found)

    @property
    def whole_layers(self) -> tuple[int, ...]:
        """The layers of which both sub-layers are skipped."""
        return tuple(i for i in range(self.layers) if self.attention[i] and self.mlp[i])

    @property
    def is_whole_layers(self) -> bool:
        """Whether every skipped sub-layer belongs to a wholly skipped layer."""
        return self.attention == self.mlp

    def format(self) -> str:
        """The shortest text form; equal masks give equal texts, and ``parse`` reads it back."""
        return _write(*(frozenset(i for i, skip in enumerate(flags) if skip) for flags in (self.attention, self.mlp)))

    def rescale(self, layers: int) -> SkipMask:
        """The same mask stretched or shrunk to another depth: layer i takes the flag of the layer at its relative depth."""
        if self.layers == 0:
            return SkipMask.none(layers)
        source = [min(self.layers - 1, (2 * i + 1) * self.layers // (2 * layers)) for i in range(layers)]
        return SkipMask(tuple(self.attention[i] for i in source), tuple(self.mlp[i] for i in source))


def normalise(text: str) -> str:
    """The canonical form of a mask's text, for models of any depth.

    Raises:
        MaskError: the text is malformed.
    """
    return _write(*_read(text))


def count(text: str) -> tuple[int, int]:
    """How many attention and how many MLP sub-layers a mask's text names.

    Raises:
        MaskError: the text is malformed.
    """
    attention, mlp = _read(text)
    return len(attention), len(mlp)


def _read(text: str) -> tuple[frozenset[int], frozenset[int]]:
    attention: set[int] = set()
    mlp: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        kind, colon, numbers = part.partition(":")
        if not colon or kind.strip() not in _PARTS:
            raise MaskError(
                f"mask: cannot read {part!r}; write 'attention:6,7-9;mlp:2' or 'layers:4-14', parts joined by ';'"
            )
        chosen = _read_numbers(numbers, part)
        if kind.strip() != "mlp":
            attention |= chosen
        if kind.strip() != "attention":
            mlp |= chosen
    return frozenset(attention), frozenset(mlp)


def _read_numbers(numbers: str, part: str) -> set[int]:
    chosen: set[int] = set()
    for piece in numbers.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise MaskError(f"mask: cannot read {piece.strip()!r} in {part!r}; layers are written as 6 or 7-9")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last > _LARGEST_LAYER:
            raise MaskError(f"mask: the range {piece.strip()!r} in {part!r} is not one of layers")
        chosen.update(range(first, last + 1))
    return chosen


def _write(attention: frozenset[int], mlp: frozenset[int]) -> str:
    both = attention & mlp
    parts = (("layers", both), ("attention", attention - both), ("mlp", mlp - both))
    return ";".join(f"{kind}:{_write_numbers(chosen)}" for kind, chosen in parts if chosen)


def _write_numbers(chosen: frozenset[int]) -> str:
    runs: list[list[int]] = []
    for index in sorted(chosen):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

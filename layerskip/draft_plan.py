"""Draft plans: what a draft pass skips, and at how many bits it reads the rest.

Attention and MLP sub-layers are skipped independently, as in Draft & Verify: Lossless Large Language Model Acceleration via
Self-Speculative Decoding (arXiv 2309.08168), section 3.2, or read at the bits of ML-SpecQD (arXiv 2503.13565). A plan that
only skips is a mask. Configurations and exports use the text form::

    attention:6,7-9;mlp:2              attention of layers 6 to 9, and the MLP of layer 2, are skipped
    layers:4-14;mlp:20                 both sub-layers of layers 4 to 14, and the MLP of layer 20
    int4;layers:12-15=skip;mlp:3=int8  all at 4 bits, but four layers skipped and the MLP of layer 3 at 8 bits
    int4;head=keep                     all at 4 bits, the output layer as it is stored

This module does not import torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

KEEP, SKIP = "keep", "skip"
BITS = {KEEP: 0, "int8": 8, "int4": 4}
"""The bits of a weight by the name of its format; 0 for a weight as it is stored."""

NAMES = {bits: name for name, bits in BITS.items()}
"""The reverse of :data:`BITS`."""
_PARTS = {"attention": ("attention",), "mlp": ("mlp",), "layers": ("attention", "mlp")}
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_LARGEST_LAYER = 9999  # so that a typing error such as 4-99999999 does not fill the memory


class PlanError(ValueError):
    """A plan that is malformed or does not fit its model."""


@dataclass(frozen=True)
class DraftPlan:
    """What is skipped of every decoder layer, and the bits at which the rest is read."""

    attention: tuple[bool, ...]  # by layer, whether it is skipped
    mlp: tuple[bool, ...]  # likewise
    attention_bits: tuple[int, ...] = ()  # by layer, 8 or 4; 0 for a sub-layer that is read as it is stored, or skipped
    mlp_bits: tuple[int, ...] = ()  # likewise; both may be empty for all 0
    head_bits: int = field(default=0, kw_only=True)  # the bits of the output layer

    def __post_init__(self) -> None:
        if len(self.attention) != len(self.mlp):
            raise PlanError(f"{len(self.attention)} attention flags, but {len(self.mlp)} MLP flags")
        for kind in ("attention", "mlp"):
            flags, bits = getattr(self, kind), getattr(self, f"{kind}_bits") or (0,) * self.layers
            if len(bits) != self.layers:
                raise PlanError(f"{len(bits)} numbers of bits for {self.layers} {kind} sub-layers")
            # Equal plans have equal fields.
            object.__setattr__(self, f"{kind}_bits", tuple(0 if skip else b for skip, b in zip(flags, bits, strict=True)))
        if unknown := set(self.bits) - NAMES.keys():
            raise PlanError(f"there is no format of {min(unknown)} bits")

    @classmethod
    def none(cls, layers: int) -> DraftPlan:
        """Return the plan for ``layers`` layers that skips nothing and reads everything as it is stored."""
        return cls.uniform(layers, 0)

    @classmethod
    def uniform(cls, layers: int, bits: int) -> DraftPlan:
        """Return the plan for ``layers`` layers that skips nothing and reads everything at some bits."""
        return cls(*((False,) * layers,) * 2, *((bits,) * layers,) * 2, head_bits=bits)

    @classmethod
    def of(cls, layers: int, attention: Set[int], mlp: Set[int]) -> DraftPlan:
        """Return the plan for ``layers`` layers that skips the given attention and MLP sub-layers, counted from 0."""
        for kind, chosen in (("attention", attention), ("mlp", mlp)):
            outside = sorted(index for index in chosen if not 0 <= index < layers)
            if outside:
                raise PlanError(f"{kind} layer {outside[0]} is out of range; the model has layers 0 to {layers - 1}")
        return cls(tuple(i in attention for i in range(layers)), tuple(i in mlp for i in range(layers)))

    @classmethod
    def parse(cls, text: str, layers: int) -> DraftPlan:
        """Parse the text form for a model of ``layers`` layers; a :class:`PlanError` if it does not fit."""
        read = _read(text)
        cls.of(layers, *map(set, read.changes.values()))  # refuses layers that the model has not
        names = [[read.changes[kind].get(layer, read.base) for layer in range(layers)] for kind in ("attention", "mlp")]
        flags = (tuple(name == SKIP for name in row) for row in names)
        return cls(*flags, *(tuple(BITS.get(name, 0) for name in row) for row in names), head_bits=BITS[read.head])

    @property
    def layers(self) -> int:
        """The number of decoder layers of the model."""
        return len(self.attention)

    @property
    def is_whole_layers(self) -> bool:
        """True if sub-layers are skipped in whole layers only."""
        return self.attention == self.mlp

    @property
    def bits(self) -> tuple[int, ...]:
        """The bits of all attention sub-layers, of all MLP sub-layers, and of the output layer."""
        return *self.sublayer_bits, self.head_bits

    @property
    def formats(self) -> set[int]:
        """The bits of all weights that are not read as they are stored."""
        return set(self.bits) - {0}

    def treatment(self, kind: str, layer: int) -> str:
        """Return ``skip``, ``keep`` or the format of a sub-layer."""
        return SKIP if getattr(self, kind)[layer] else NAMES[getattr(self, f"{kind}_bits")[layer]]

    def changed(self, kind: str, layer: int, treatment: str) -> DraftPlan:
        """Return the plan with another treatment of a sub-layer."""
        flags, bits = list(getattr(self, kind)), list(getattr(self, f"{kind}_bits"))
        flags[layer], bits[layer] = treatment == SKIP, BITS.get(treatment, 0)
        changes: dict[str, Any] = {kind: tuple(flags), f"{kind}_bits": tuple(bits)}
        return replace(self, **changes)

    @property
    def sublayer_bits(self) -> tuple[int, ...]:
        """The bits of all attention sub-layers and of all MLP sub-layers."""
        return *self.attention_bits, *self.mlp_bits

    def without_formats(self) -> DraftPlan:
        """Return the mask that skips the same."""
        return DraftPlan(self.attention, self.mlp)

    def format(self) -> str:
        """Return the canonical text form; the inverse of :meth:`parse`. Its first word is the commonest format."""
        names = {kind: [self.treatment(kind, layer) for layer in range(self.layers)] for kind in ("attention", "mlp")}
        head = NAMES[self.head_bits]
        found = Counter([head, *names["attention"], *names["mlp"]])
        base = max(BITS, key=lambda name: found[name])
        changes = {kind: {layer: name for layer, name in enumerate(row) if name != base} for kind, row in names.items()}
        return _write(_Read(base, changes, head))


def normalise_mask(text: str) -> str:
    """Return a text without redundancy that means the same for any number of layers.

    A :class:`PlanError` refuses a text that is malformed or has formats of fewer bits.
    """
    read = _read(text)
    if read.formats:
        raise PlanError(f"{text!r} reads fewer bits; that is a value of weights, of the method quantized")
    return _write(read)


def normalise_formats(text: str) -> str:
    """Return a text as :func:`normalise_mask` does; a :class:`PlanError` refuses one without formats of fewer bits."""
    read = _read(text)
    if not read.formats:
        raise PlanError(f"{text!r} reads all bits; that is a mask, of the method layer_skip")
    return _write(read)


def sublayers(text: str) -> tuple[set[int], set[int]]:
    """Return the layers whose attention and whose MLP a text skips; a :class:`PlanError` if it is malformed."""
    attention, mlp = ({i for i, name in each.items() if name == SKIP} for each in _read(text).changes.values())
    return attention, mlp


@dataclass(frozen=True)
class _Read:
    """A text: the format of what it does not name, the treatments by kind and layer, and the format of the output layer."""

    base: str
    changes: Mapping[str, dict[int, str]]
    head: str

    @property
    def formats(self) -> set[str]:
        """The names of all formats but those as stored."""
        return {self.base, self.head, *self.changes["attention"].values(), *self.changes["mlp"].values()} - {KEEP, SKIP}


def _read(text: str) -> _Read:
    base, head, changes = KEEP, "", {"attention": dict[int, str](), "mlp": dict[int, str]()}
    for number, part in enumerate(filter(None, (piece.strip() for piece in text.split(";")))):
        place, _, treatment = (piece.strip() for piece in part.partition("="))
        kind, _, numbers = place.partition(":")
        if number == 0 and part in BITS:
            base = part
        elif place == "head" and treatment in BITS:
            head = treatment
        elif kind.strip() in _PARTS and (not treatment or treatment in (SKIP, *BITS)) and ("=" in part) == bool(treatment):
            for name in _PARTS[kind.strip()]:
                changes[name] |= dict.fromkeys(_read_numbers(numbers, part), treatment or SKIP)
        else:
            known = "'attention:6,7-9;mlp:2', 'layers:4-14' or 'int4;layers:12-15=skip;mlp:3=int8', joined by ';'"
            raise PlanError(f"cannot read {part!r}; write {known}")
    named = {kind: {layer: name for layer, name in found.items() if name != base} for kind, found in changes.items()}
    return _Read(base, named, head or base)


def _read_numbers(numbers: str, part: str) -> set[int]:
    chosen: set[int] = set()
    for piece in numbers.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise PlanError(f"cannot read {piece.strip()!r} in {part!r}; layers are written as 6 or 7-9")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last > _LARGEST_LAYER:
            raise PlanError(f"{piece.strip()!r} in {part!r} is not a range of layers")
        chosen.update(range(first, last + 1))
    return chosen


def _write(read: _Read) -> str:
    parts = [] if read.base == KEEP else [read.base]
    for treatment in (SKIP, *BITS):
        attention, mlp = ({i for i, name in each.items() if name == treatment} for each in read.changes.values())
        both = attention & mlp
        for kind, chosen in (("layers", both), ("attention", attention - both), ("mlp", mlp - both)):
            if chosen:
                parts.append(f"{kind}:{_write_numbers(chosen)}" + (f"={treatment}" if read.formats else ""))
    if read.head != read.base:
        parts.append(f"head={read.head}")
    return ";".join(parts)


def _write_numbers(chosen: set[int]) -> str:
    runs: list[list[int]] = []
    for index in sorted(chosen):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

"""What stands in for skipped sub-layers? A map, a hundred times cheaper, from what came before them to what they would add.

Verification keeps every output exact, so nothing obliges a skip to be empty. A bridge spans a contiguous run of skipped
layers, or a single skipped sub-layer; it reads the hidden state that they would have read, scaled to a mean square of one as
root mean square layer normalisation does (arXiv 1910.07467), and gives what is added in their place. Bridges belong to one
mask of one target, and touch none of its weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from layerskip.config import ConfigError
from layerskip.mask import Gap, MaskError, SkipMask
from layerskip.models.packing import multiply, pack_matrices, packs
from layerskip.models.target import Target
from layerskip.models.trained_module import load_head, save_head
from layerskip.rules import check_integer

_KIND = "bridge"
KINDS = ("mean", "linear", "mlp")


@dataclass(frozen=True)
class BridgeShape:
    """What the bridges of a mask are made from.

    Args:
        mask: in text form; every one of its gaps has a bridge.
        layers: of the target.
        hidden: H, the width of its hidden states.
        kind: ``mean`` (one vector), ``linear`` (an affine map) or ``mlp`` (that, and a gated MLP beside it).
        rank: of the map; 0 for a full one.
        width: of the MLP.

    Raises:
        ConfigError: a value is out of range.
    """

    mask: str
    layers: int
    hidden: int
    kind: str = "linear"
    rank: int = 0
    width: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"bridge.kind: {self.kind!r} is not one of {', '.join(KINDS)}")
        for name in ("rank", "width"):
            check_integer(f"bridge.{name}", getattr(self, name), 0)
        if self.rank > self.hidden:
            raise ConfigError(f"bridge.rank: {self.rank} is not within 0 (a full map) and {self.hidden}")
        if self.kind == "mean" and self.rank:
            raise ConfigError("bridge.rank: says nothing of a mean")
        if (self.width > 0) != (self.kind == "mlp"):
            raise ConfigError(f"bridge.width: {self.width} is not what a bridge of kind {self.kind} has")

    @classmethod
    def of(cls, target: Target, mask: SkipMask, kind: str = "linear", rank: int = 0, width: int = 0) -> BridgeShape:
        """That of a target's mask."""
        return cls(mask.format(), target.layers, target.hidden, kind, rank, width)

    @property
    def spans(self) -> int:
        """How many bridges there are."""
        return len(SkipMask.parse(self.mask, self.layers).gaps)

    @property
    def numbers(self) -> int:
        """How many numbers a pass reads for all of them together."""
        flat = 0 if self.kind == "mean" else 2 * self.rank * self.hidden or self.hidden**2
        return self.spans * (self.hidden + flat + 3 * self.width * self.hidden)

    def is_like(self, other: BridgeShape) -> bool:
        """Whether the bridges of another mask are of the same kind and size."""
        return replace(self, mask="") == replace(other, mask="")

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Bridge(nn.Module):
    """What stands in for one gap. New, it adds nothing.

    Args:
        shape: of the bridges it is one of.
    """

    def __init__(self, shape: BridgeShape) -> None:
        super().__init__()
        hidden, rank, width = shape.hidden, shape.rank, shape.width
        self.shape = shape
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.weight = self.down = self.up = self.gate = self.value = self.out = None
        if shape.kind != "mean" and rank:
            self.down = nn.Parameter(torch.randn(rank, hidden) * hidden**-0.5)
            self.up = nn.Parameter(torch.zeros(hidden, rank))
        elif shape.kind != "mean":
            self.weight = nn.Parameter(torch.zeros(hidden, hidden))
        if width:
            self.gate = nn.Parameter(torch.randn(width, hidden) * hidden**-0.5)
            self.value = nn.Parameter(torch.randn(width, hidden) * hidden**-0.5)
            self.out = nn.Parameter(torch.zeros(hidden, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., H]``: what is added in the gap's place."""
        if self.shape.kind == "mean":
            return self.bias.to(hidden.dtype).expand_as(hidden)
        scaled = normalised(hidden).to(self.bias.dtype)
        if self.weight is not None:
            found = multiply(scaled, self.weight, self.bias)
        else:
            assert self.down is not None
            assert self.up is not None
            found = multiply(multiply(scaled, self.down), self.up, self.bias)
        if self.gate is not None:
            assert self.value is not None
            assert self.out is not None
            found = found + multiply(silu(multiply(scaled, self.gate)) * multiply(scaled, self.value), self.out)
        return found.to(hidden.dtype)

    @torch.no_grad()
    def set_map(self, weight: Tensor, bias: Tensor, basis: Tensor | None = None) -> None:
        """Take an affine map.

        Args:
            weight: ``[H, H]``, from what is read to what is added.
            bias: ``[H]``.
            basis: ``[H, rank]``, orthonormal: what a map of that rank may add.
        """
        self.bias.copy_(bias)
        if self.weight is not None:
            self.weight.copy_(weight)
        elif self.down is not None and self.up is not None:
            assert basis is not None
            self.up.copy_(basis)
            self.down.copy_(basis.T @ weight)


def normalised(hidden: Tensor) -> Tensor:
    """``[..., H]``, scaled to a mean square of one."""
    return rms_norm(hidden, hidden.shape[-1:], eps=1e-6)


class Bridges(nn.Module):
    """The bridges of a mask.

    Args:
        shape: what they are made from.
    """

    def __init__(self, shape: BridgeShape) -> None:
        super().__init__()
        self.shape = shape
        self.mask = SkipMask.parse(shape.mask, shape.layers)
        self.spans = nn.ModuleDict({gap.name: Bridge(shape) for gap in self.mask.gaps})

    def of(self, gap: Gap) -> Bridge:
        """The bridge of a gap."""
        found = self.spans[gap.name]
        assert isinstance(found, Bridge)
        return found

    def check(self, mask: SkipMask) -> None:
        """Refuse to stand in for another mask.

        Raises:
            ConfigError: they are not this mask's.
        """
        if self.mask != mask:
            raise ConfigError(f"bridges: stand in for {self.shape.mask or 'nothing'}, not for {mask.format() or 'nothing'}")

    @torch.no_grad()
    def warm(self, other: Bridges) -> None:
        """Take the bridges of another mask, each from its nearest neighbour of the same kind of gap, where there is one.

        Raises:
            ConfigError: the other's bridges are of another kind or size.
        """
        if not self.shape.is_like(other.shape):
            raise ConfigError(f"bridge: those of {other.shape.mask} are of another kind or size")
        for gap, bridge in self.parts():
            near = [(abs(g.first - gap.first) + abs(g.last - gap.last), b) for g, b in other.parts() if g.kind == gap.kind]
            if near:
                bridge.load_state_dict(min(near, key=lambda pair: pair[0])[1].state_dict())

    def decoding(self, target: Target) -> Bridges:
        """A copy as it decodes for a target: in its dtype, on its device, with nothing to be learnt."""
        return _decoding(copy.deepcopy(self), target)

    def parts(self) -> list[tuple[Gap, Bridge]]:
        """Every gap with its bridge, in the order in which a pass comes to them."""
        return [(gap, self.of(gap)) for gap in self.mask.gaps]


def save_bridges(
    folder: Path, bridges: Bridges, target: Target, training: Mapping[str, Any], calibration: str | None = None
) -> None:
    """Write the bridges of a mask of a target.

    Args:
        folder: is made.
        bridges: of any dtype.
        target: that they belong to.
        training: how they came about, for people.
        calibration: the digest of what they were fitted to.
    """
    save_head(folder, _KIND, bridges.shape.to_dict(), bridges.state_dict(), target, training, calibration)


def load_bridges(folder: str | Path, target: Target, mask: SkipMask | None = None) -> Bridges:
    """The bridges of a mask of a target, in its dtype and on its device.

    Args:
        folder: as :func:`save_bridges` wrote it.
        target: that they must be for.
        mask: that they must be for; None for any.

    Raises:
        ConfigError: there are none, they are damaged, or they were made for another target or mask.
    """
    fields, weights = load_head(folder, _KIND, target, "bridge")
    try:
        shape = BridgeShape(**fields)
        if mask is not None and shape.mask != mask.format():
            raise ConfigError(
                f"bridge: {folder} stands in for {shape.mask or 'nothing'}, not for {mask.format() or 'nothing'}"
            )
        bridges = Bridges(shape)
        bridges.load_state_dict(weights)
    except (TypeError, RuntimeError, MaskError) as error:
        raise ConfigError(f"bridge: {folder} is damaged: {' '.join(str(error).split())[:200]}") from error
    bridges = _decoding(bridges, target)
    if packs(target.model):
        pack_matrices(bridges)
    return bridges


def _decoding(bridges: Bridges, target: Target) -> Bridges:
    return bridges.to(target.device, target.model.dtype).eval().requires_grad_(False)

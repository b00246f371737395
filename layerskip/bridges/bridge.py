"""Bridges: small maps that replace skipped sub-layers in a draft pass.

A bridge replaces a contiguous run of skipped layers, or a single skipped sub-layer, at about a hundredth of the cost.
Verification keeps every output exact, so a skip need not be empty. The bridge reads the hidden state that the skipped
sub-layers would have read, scaled to a mean square of one as in RMSNorm (arXiv 1910.07467), and returns what is added to the
residual stream in their place. Bridges belong to one mask of one target and change none of its weights.
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

from layerskip.config import ConfigError, check_integer
from layerskip.mask import Gap, MaskError, SkipMask
from layerskip.models.packing import multiply, pack_matrices, uses_packing
from layerskip.models.target import Target
from layerskip.models.trained_module import load_trained, save_trained
from layerskip.models.weights import check_not_split

_KIND = "bridge"
KINDS = ("mean", "linear", "mlp")


@dataclass(frozen=True)
class BridgeShape:
    """The mask, kind and size of a set of bridges.

    Args:
        mask: in text form; each of its gaps has one bridge.
        layers: the number of layers of the target.
        hidden: H, the width of the target's hidden states.
        kind: ``mean`` (one vector), ``linear`` (an affine map) or ``mlp`` (an affine map plus a gated MLP).
        rank: the rank of the map; 0 for full rank.
        width: the width of the MLP; 0 for other kinds.
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
            raise ConfigError(f"bridge.rank: {self.rank} is not within 0 (full rank) to {self.hidden}")
        if self.kind == "mean" and self.rank:
            raise ConfigError("bridge.rank: does not apply to kind mean")
        if (self.width > 0) != (self.kind == "mlp"):
            raise ConfigError(f"bridge.width: {self.width} does not fit kind {self.kind}; only mlp has a width, above 0")

    @classmethod
    def of(cls, target: Target, mask: SkipMask, kind: str = "linear", rank: int = 0, width: int = 0) -> BridgeShape:
        """Return the shape for a mask of a target; the other arguments are those of :class:`BridgeShape`."""
        return cls(mask.format(), target.layers, target.hidden, kind, rank, width)

    @property
    def parameter_count(self) -> int:
        return self.size["parameters"]

    @property
    def size(self) -> dict[str, int]:
        """The numbers of modules, of their parameters, and of modules that depend on their input, as costs count them."""
        count = len(SkipMask.parse(self.mask, self.layers).gaps)
        flat = 0 if self.kind == "mean" else 2 * self.rank * self.hidden or self.hidden**2
        parameters = count * (self.hidden + flat + 3 * self.width * self.hidden)
        return {"modules": count, "parameters": parameters, "maps": 0 if self.kind == "mean" else count}

    def is_compatible(self, other: BridgeShape) -> bool:
        """Return whether the bridges of another mask have the same kind and size."""
        return replace(self, mask="") == replace(other, mask="")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Bridge(nn.Module):
    """The bridge of one gap, of the shape of its set. It is initialised to add nothing."""

    def __init__(self, shape: BridgeShape) -> None:
        super().__init__()
        hidden, rank, width = shape.hidden, shape.rank, shape.width
        self.shape = shape
        self.bias = nn.Parameter(torch.zeros(hidden))
        if rank:
            self.down = nn.Parameter(torch.randn(rank, hidden) * hidden**-0.5)
            self.up = nn.Parameter(torch.zeros(hidden, rank))
        elif shape.kind != "mean":
            self.weight = nn.Parameter(torch.zeros(hidden, hidden))
        if width:
            self.gate = nn.Parameter(torch.randn(width, hidden) * hidden**-0.5)
            self.value = nn.Parameter(torch.randn(width, hidden) * hidden**-0.5)
            self.out = nn.Parameter(torch.zeros(hidden, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states ``[..., H]`` to what is added in place of the gap, ``[..., H]``."""
        if self.shape.kind == "mean":
            return self.bias.to(hidden.dtype).expand_as(hidden)
        scaled = rms_normalised(hidden).to(self.bias.dtype)
        if self.shape.rank:
            output = multiply(multiply(scaled, self.down), self.up, self.bias)
        else:
            output = multiply(scaled, self.weight, self.bias)
        if self.shape.width:
            output = output + multiply(silu(multiply(scaled, self.gate)) * multiply(scaled, self.value), self.out)
        return output.to(hidden.dtype)

    @torch.no_grad()
    def set_map(self, weight: Tensor, bias: Tensor, basis: Tensor | None = None) -> None:
        """Set the affine map: weight ``[H, H]`` of the scaled hidden state, and bias ``[H]``.

        A map of lower rank takes ``basis``, ``[H, rank]`` and orthonormal, for its outputs.
        """
        self.bias.copy_(bias)
        if basis is not None:
            self.up.copy_(basis)
            self.down.copy_(basis.T @ weight)
        elif self.shape.kind != "mean":
            self.weight.copy_(weight)


def rms_normalised(hidden: Tensor) -> Tensor:
    """Return hidden states ``[..., H]`` scaled to a mean square of one."""
    return rms_norm(hidden, hidden.shape[-1:], eps=1e-6)


class Bridges(nn.Module):
    """The bridges of a mask, one per gap."""

    def __init__(self, shape: BridgeShape) -> None:
        super().__init__()
        self.shape = shape
        self.mask = SkipMask.parse(shape.mask, shape.layers)
        self.spans = nn.ModuleDict({gap.name: Bridge(shape) for gap in self.mask.gaps})

    def of(self, gap: Gap) -> Bridge:
        bridge = self.spans[gap.name]
        assert isinstance(bridge, Bridge)
        return bridge

    @torch.no_grad()
    def warm_start(self, other: Bridges) -> None:
        """Copy the weights of another mask's bridges: for each gap, those of the nearest gap of the same kind, if any."""
        if not self.shape.is_compatible(other.shape):
            raise ConfigError(f"bridge: the bridges of {other.shape.mask} have another kind or size")
        for gap, bridge in self.items():
            near = [(abs(g.first - gap.first) + abs(g.last - gap.last), b) for g, b in other.items() if g.kind == gap.kind]
            if near:
                bridge.load_state_dict(min(near, key=lambda pair: pair[0])[1].state_dict())

    def for_decoding(self, target: Target) -> Bridges:
        """Return a copy for decoding: in the target's dtype, on its device, without gradients."""
        return copy.deepcopy(self).to(target.device, target.model.dtype).eval().requires_grad_(False)

    def items(self) -> list[tuple[Gap, Bridge]]:
        """Return every gap with its bridge, in the order of a forward pass."""
        return [(gap, self.of(gap)) for gap in self.mask.gaps]


def save_bridges(
    folder: Path, bridges: Bridges, target: Target, training: Mapping[str, Any], calibration: str | None = None
) -> None:
    """Save a target's bridges, in any dtype; the arguments are those of :func:`save_trained`."""
    save_trained(folder, _KIND, bridges.shape.to_dict(), bridges.state_dict(), target, training, calibration)


def load_bridges(folder: str | Path, target: Target, mask: SkipMask | None = None) -> Bridges:
    """Load the bridges of a target, for a mask or, with None, for any; in the target's dtype and on its device.

    Raises:
        ConfigError: there are none, they are damaged or of another target or mask, or the target is on several devices.
    """
    check_not_split(target.model, "bridges")
    fields, weights = load_trained(folder, _KIND, target, "bridge")
    try:
        shape = BridgeShape(**fields)
        if mask is not None and shape.mask != mask.format():
            raise ConfigError(f"bridge: {folder} is made for mask {shape.mask!r}, not for {mask.format()!r}")
        bridges = Bridges(shape)
        bridges.load_state_dict(weights)
    except (TypeError, RuntimeError, MaskError) as error:
        raise ConfigError(f"bridge: {folder} is damaged: {' '.join(str(error).split())[:200]}") from error
    bridges = bridges.for_decoding(target)
    if uses_packing(target.model):
        pack_matrices(bridges)
    return bridges

"""Which affine map takes a bridge from what it reads to what it should give? Ridge regression.

Hoerl and Kennard (Technometrics 12, 1970); the constant is chosen on rows that the map was not fitted to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .bridge import Bridge, normalised

_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_CHOOSING = 0.2  # of the rows: those that the constant is chosen by
_AT_ONCE = 4096  # rows


def regress(bridge: Bridge, hidden: Tensor, wanted: Tensor) -> float:
    """Fit one bridge; returns the chosen constant.

    Args:
        bridge: its MLP, if it has one, is left alone.
        hidden: ``[n, H]`` float32: what it reads.
        wanted: ``[n, H]`` float32: what it should give.
    """
    read = normalised(hidden)
    learnt = read.shape[0] - int(_CHOOSING * read.shape[0])
    if bridge.shape.kind == "mean" or learnt < 2:
        bridge.bias.copy_(wanted.mean(0))
        return 0.0
    part = _Moments(read[:learnt], wanted[:learnt])
    chosen = min(_RIDGES, key=lambda ridge: _error(*part.solve(ridge), read[learnt:], wanted[learnt:]))
    moments = _Moments(read, wanted)
    weight, bias = moments.solve(chosen)
    basis = None
    if bridge.shape.rank:
        # Reduced-rank regression (Izenman, Journal of Multivariate Analysis 5, 1975): most of what the full map adds.
        added = (read - moments.mean) @ weight.T
        basis = torch.linalg.eigh((added.T @ added).double())[1][:, -bridge.shape.rank :].to(weight.dtype)
        bias = moments.middle - basis @ (basis.T @ (weight @ moments.mean))
    bridge.set_map(weight, bias, basis)
    return chosen


class _Moments:
    """What a regression needs of ``read`` and ``wanted``, ``[n, H]`` each.

    Inputs are standardised, so that the constant means the same for each of them.
    """

    def __init__(self, read: Tensor, wanted: Tensor) -> None:
        self.mean, self.scale, self.middle = read.mean(0), read.std(0).clamp_min(1e-6), wanted.mean(0)
        self._squares = torch.zeros(read.shape[1], read.shape[1], dtype=torch.float64, device=read.device)
        self._products = torch.zeros(read.shape[1], wanted.shape[1], dtype=torch.float64, device=read.device)
        for first in range(0, read.shape[0], _AT_ONCE):  # without a second copy of all rows
            some = slice(first, first + _AT_ONCE)
            inputs = (read[some] - self.mean) / self.scale
            self._squares += (inputs.T @ inputs).double() / read.shape[0]
            self._products += (inputs.T @ (wanted[some] - self.middle)).double() / read.shape[0]

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """An affine map ``[H, H]``, ``[H]``."""
        squares = self._squares.clone()
        squares.diagonal().add_(ridge)
        solved = torch.cholesky_solve(self._products, torch.linalg.cholesky(squares)).to(self.scale.dtype)
        weight = (solved / self.scale[:, None]).T
        return weight, self.middle - weight @ self.mean


def _error(weight: Tensor, bias: Tensor, read: Tensor, wanted: Tensor) -> float:
    if not read.shape[0]:
        return 0.0
    return float((read @ weight.T + bias - wanted).square().mean())

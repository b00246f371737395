"""Which affine map takes a bridge from what it reads to what it should give? Ridge regression.

Hoerl and Kennard (Technometrics 12, 1970); the constant is chosen on rows that the map was not fitted to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from layerskip.models.bridge import Bridge, normalised

_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_CHOOSING = 0.2  # of the rows: those that the constant is chosen by
_AT_ONCE = 1024  # rows


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
    chosen = _choose(read, wanted, learnt)
    moments = _Moments(read, wanted)
    weight, bias = moments.solve(chosen)
    basis = None
    if bridge.shape.rank:
        # Reduced-rank regression (Izenman, Journal of Multivariate Analysis 5, 1975): most of what the full map adds.
        basis = torch.linalg.eigh(moments.spread(weight))[1][:, -bridge.shape.rank :].to(weight.dtype)
        bias = moments.middle - basis @ (basis.T @ (weight @ moments.mean))
    bridge.set_map(weight, bias, basis)
    return chosen


def solving_bytes(rows: int, hidden: int) -> int:
    """What :func:`regress` takes beside what it reads, scaled or not, and should give.

    Args:
        rows: n.
        hidden: H.
    """
    return 72 * hidden**2 + 12 * min(rows, _AT_ONCE) * hidden  # sums and factors in float64, and some rows in float32


@torch.no_grad()
def squared_error(mapped: Callable[[Tensor], Tensor], hidden: Tensor, wanted: Tensor, at_once: int = _AT_ONCE) -> float:
    """The mean over all numbers.

    Args:
        mapped: of ``[n, H]``, as many.
        hidden: ``[n, H]``: what it reads.
        wanted: ``[n, H]``: what it should give.
        at_once: rows, as what is mapped takes memory.
    """
    parts = (slice(first, first + at_once) for first in range(0, hidden.shape[0], at_once))
    return sum(float((mapped(hidden[part]) - wanted[part]).square().sum()) for part in parts) / max(1, wanted.numel())


def _choose(read: Tensor, wanted: Tensor, learnt: int) -> float:
    """The constant whose map, fitted to the first rows, errs least on the others."""
    moments = _Moments(read[:learnt], wanted[:learnt])

    def error(ridge: float) -> float:
        weight, bias = moments.solve(ridge)
        return squared_error(lambda some: some @ weight.T + bias, read[learnt:], wanted[learnt:])

    return min(_RIDGES, key=error)


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

    def spread(self, weight: Tensor) -> Tensor:
        """``[H, H]`` float64: the covariance of what a map adds to what was read."""
        scaled = (weight * self.scale).double()
        return scaled @ self._squares @ scaled.T

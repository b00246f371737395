"""Fitting of a bridge's affine map by ridge regression, and of its MLP by gradient descent.

Hoerl and Kennard (Technometrics 12, 1970). The ridge constant is chosen on rows that the map was not fitted to.

A bridge's MLP is then fitted to the same pairs by gradient descent, without running the target. A step costs a thousandth of
one through the target's layers, so several epochs are affordable.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from layerskip.bridges.bridge import Bridge, rms_normalised
from layerskip.heads.training import rate_factor

_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_VALIDATION = 0.2  # share of the rows, the last ones, on which the constant is chosen
_AT_ONCE = 1024  # rows


def regress(bridge: Bridge, hidden: Tensor, wanted: Tensor) -> float:
    """Fit one bridge's map to inputs and outputs ``[n, H]`` float32; return the chosen ridge constant."""
    inputs = rms_normalised(hidden)
    fitted = inputs.shape[0] - int(_VALIDATION * inputs.shape[0])
    if bridge.shape.kind == "mean" or fitted < 2:
        bridge.bias.copy_(wanted.mean(0))
        return 0.0
    chosen = _choose(inputs, wanted, fitted)
    moments = _Moments(inputs, wanted)
    weight, bias = moments.solve(chosen)
    basis = None
    if bridge.shape.rank:
        # Reduced-rank regression (Izenman, Journal of Multivariate Analysis 5, 1975): the main directions of the full map's
        # output.
        basis = torch.linalg.eigh(moments.covariance(weight))[1][:, -bridge.shape.rank :].to(weight.dtype)
        bias = moments.output_mean - basis @ (basis.T @ (weight @ moments.mean))
    bridge.set_map(weight, bias, basis)
    return chosen


def regression_bytes(rows: int, hidden: int) -> int:
    """Return the bytes that :func:`regress` needs in addition to its inputs, scaled or not, and outputs."""
    return 72 * hidden**2 + 12 * min(rows, _AT_ONCE) * hidden  # sums and factors in float64, and some rows in float32


@torch.no_grad()
def squared_error(function: Callable[[Tensor], Tensor], hidden: Tensor, wanted: Tensor, at_once: int = _AT_ONCE) -> float:
    """Return the mean squared error of a function from ``[n, H]`` to ``[n, H]``, with ``at_once`` rows at a time."""
    parts = (slice(first, first + at_once) for first in range(0, hidden.shape[0], at_once))
    return sum(float((function(hidden[part]) - wanted[part]).square().sum()) for part in parts) / max(1, wanted.numel())


def _choose(inputs: Tensor, wanted: Tensor, fitted: int) -> float:
    """Return the constant whose map, fitted to the first rows, has the smallest error on the others."""
    moments = _Moments(inputs[:fitted], wanted[:fitted])

    def error(ridge: float) -> float:
        weight, bias = moments.solve(ridge)
        return squared_error(lambda some: some @ weight.T + bias, inputs[fitted:], wanted[fitted:])

    return min(_RIDGES, key=error)


class _Moments:
    """First and second moments of inputs and outputs, ``[n, H]`` each, from which every ridge regression can be solved.

    Inputs are standardised, so that the constant has the same effect on each of them.
    """

    def __init__(self, inputs: Tensor, wanted: Tensor) -> None:
        self.mean, self.scale, self.output_mean = inputs.mean(0), inputs.std(0).clamp_min(1e-6), wanted.mean(0)
        self._squares = torch.zeros(inputs.shape[1], inputs.shape[1], dtype=torch.float64, device=inputs.device)
        self._products = torch.zeros(inputs.shape[1], wanted.shape[1], dtype=torch.float64, device=inputs.device)
        for first in range(0, inputs.shape[0], _AT_ONCE):  # avoids a second copy of all rows
            some = slice(first, first + _AT_ONCE)
            standard = (inputs[some] - self.mean) / self.scale
            self._squares += (standard.T @ standard).double() / inputs.shape[0]
            self._products += (standard.T @ (wanted[some] - self.output_mean)).double() / inputs.shape[0]

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Solve for an affine map: weight ``[H, H]`` and bias ``[H]``."""
        squares = self._squares.clone()
        squares.diagonal().add_(ridge)
        solved = torch.cholesky_solve(self._products, torch.linalg.cholesky(squares)).to(self.scale.dtype)
        weight = (solved / self.scale[:, None]).T
        return weight, self.output_mean - weight @ self.mean

    def covariance(self, weight: Tensor) -> Tensor:
        """Return ``[H, H]`` float64: the covariance of a map's output over the inputs."""
        scaled = (weight * self.scale).double()
        return scaled @ self._squares @ scaled.T


_EPOCHS = 6
_BATCH = 256
_MLP_RATE, _MAP_RATE = 2e-3, 2e-4  # the map is already optimal by itself, so it only follows
_WARMUP, _DECAY = 0.05, 0.1
_MLP_VALIDATION = 0.1  # share of the rows, the last ones


def regress_mlp(bridge: Bridge, hidden: Tensor, wanted: Tensor) -> float:
    """Fit a bridge's map, then map and MLP together by AdamW (arXiv 1711.05101) on the squared error.

    If this does not reduce the error on validation rows, the map alone is fitted to all rows. The bridge, its inputs and
    outputs ``[n, H]`` are in float32.

    Returns:
        The ridge constant.
    """
    rows = hidden.shape[0] - int(_MLP_VALIDATION * hidden.shape[0])
    chosen = regress(bridge, hidden[:rows], wanted[:rows])
    map_alone = {name: tensor.clone() for name, tensor in bridge.state_dict().items()}
    map_error = squared_error(bridge, hidden[rows:], wanted[rows:], _BATCH)
    with torch.inference_mode(False), torch.enable_grad():
        _descend(bridge, hidden[:rows], wanted[:rows])
    if squared_error(bridge, hidden[rows:], wanted[rows:], _BATCH) < map_error:
        return chosen
    bridge.load_state_dict(map_alone)
    del map_alone  # frees memory for the regression
    return regress(bridge, hidden, wanted)


def mlp_regression_bytes(rows: int, hidden: int, width: int) -> int:
    """Return the bytes that :func:`regress_mlp` adds to inputs and outputs after the map's fit; 0 without an MLP."""
    if not width:
        return 0
    parameters = hidden * (hidden + 1 + 3 * width)
    return 24 * parameters + 4 * min(rows, _BATCH) * (8 * hidden + 6 * width)  # AdamW and a copy of the map; activations


def _descend(bridge: Bridge, hidden: Tensor, wanted: Tensor) -> None:
    rows = hidden.shape[0]
    batches = max(1, rows // _BATCH)
    scale = float(wanted.square().mean()) or 1.0
    mlp = [parameter for name, parameter in bridge.named_parameters() if name in ("gate", "value", "out")]
    others = [parameter for name, parameter in bridge.named_parameters() if name not in ("gate", "value", "out")]
    rates = (_MLP_RATE, _MAP_RATE)
    optimiser = torch.optim.AdamW([{"params": mlp}, {"params": others}], weight_decay=_DECAY)
    generator = torch.Generator().manual_seed(0)
    for step in range(_EPOCHS * batches):
        if step % batches == 0:
            order = torch.randperm(rows, generator=generator)
        factor = rate_factor(step / (_EPOCHS * batches), _WARMUP)
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        some = order[step % batches * _BATCH :][:_BATCH].to(hidden.device)
        loss = (bridge(hidden[some]) - wanted[some]).square().mean() / scale
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

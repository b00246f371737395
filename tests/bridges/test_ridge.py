"""Tests the choice of the ridge constant on validation rows, and the removal of outliers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layerskip.bridges.bridge import Bridge, BridgeShape
from layerskip.bridges.fit import _regress
from layerskip.bridges.ridge import regress

HIDDEN, ROWS = 8, 60
SHAPE = BridgeShape("layers:1-2", 4, HIDDEN, "linear")
CONSTANTS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


def _drawn(noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs with a root mean square of 1, and outputs of an affine map with noise."""
    source = np.random.default_rng(0)
    read = source.standard_normal((ROWS, HIDDEN))
    read /= np.sqrt((read**2).mean(-1, keepdims=True))
    wanted = read @ source.standard_normal((HIDDEN, HIDDEN)) + 0.5 + noise * source.standard_normal((ROWS, HIDDEN))
    return torch.from_numpy(read).float(), torch.from_numpy(wanted).float()


def _error(read: np.ndarray, wanted: np.ndarray, constant: float) -> float:
    """The error, on the last fifth of the rows, of a map that numpy fits to the others."""
    learnt = ROWS - ROWS // 5
    middle, scale = read[:learnt].mean(0), read[:learnt].std(0, ddof=1)
    scaled = (read - middle) / scale
    padded = np.concatenate([scaled[:learnt], np.sqrt(constant * learnt) * np.eye(HIDDEN)])
    padded_wanted = np.concatenate([wanted[:learnt] - wanted[:learnt].mean(0), np.zeros((HIDDEN, HIDDEN))])
    found = scaled @ np.linalg.lstsq(padded, padded_wanted, rcond=None)[0] + wanted[:learnt].mean(0)
    return float(((found - wanted)[learnt:] ** 2).mean())


@pytest.mark.parametrize("noise", [0.0, 1.0, 4.0, 20.0])
def test_the_constant_with_the_smallest_validation_error_is_chosen(noise: float) -> None:
    read, wanted = _drawn(noise)
    with torch.no_grad():
        chosen = regress(Bridge(SHAPE), read, wanted)
    errors = {c: _error(read.double().numpy(), wanted.double().numpy(), c) for c in CONSTANTS}
    assert chosen == min(errors, key=lambda c: errors[c])
    if noise == 0.0:
        assert chosen == CONSTANTS[0]
    if noise == 20.0:
        assert chosen == CONSTANTS[-1]


def test_outliers_are_left_out() -> None:
    read, wanted = _drawn(0.1)
    far = wanted.clone()
    far[7] *= 1000.0
    near = torch.arange(ROWS) != 7
    with torch.no_grad():
        _regress(found := Bridge(SHAPE), [(read[None], far[None])], ROWS)
        regress(expected := Bridge(SHAPE), read[near], wanted[near])
    for name, value in expected.state_dict().items():
        assert torch.allclose(found.state_dict()[name], value, atol=1e-6), name

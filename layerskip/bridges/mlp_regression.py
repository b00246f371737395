"""Fitting of a bridge's MLP by gradient descent to the pairs that its map is fitted to, without running the target.

A step costs a thousandth of one through the target's layers, so several epochs are affordable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerskip.bridges.ridge import regress, squared_error
from layerskip.heads.learning_rate import rate_factor
from layerskip.models.bridge import Bridge

_EPOCHS = 6
_BATCH = 256
_MLP_RATE, _MAP_RATE = 2e-3, 2e-4  # the map is already optimal by itself, so it only follows
_WARMUP, _DECAY = 0.05, 0.1
_VALIDATION = 0.1  # share of the rows, the last ones


def regress_mlp(bridge: Bridge, hidden: Tensor, wanted: Tensor) -> float:
    """Fit a bridge's map, then map and MLP together by AdamW (arXiv 1711.05101) on the squared error.

    If this does not reduce the error on validation rows, the map alone is fitted to all rows.

    Args:
        bridge: the bridge, in float32.
        hidden: ``[n, H]`` float32: its inputs.
        wanted: ``[n, H]`` float32: the outputs to fit.

    Returns:
        The ridge constant.
    """
    rows = hidden.shape[0] - int(_VALIDATION * hidden.shape[0])
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

"""What does a bridge's map leave to its MLP? Learnt from the pairs that the map is fitted to; no layer of the target is run.

A step costs a thousandth of one through the target's layers, so the texts can be gone through several times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerskip.bridges.ridge import regress, squared_error
from layerskip.heads.learning_rate import share_of_rate
from layerskip.models.bridge import Bridge

_EPOCHS = 6
_BATCH = 256
_MLP_RATE, _MAP_RATE = 2e-3, 2e-4  # the map is as good as it gets alone, and only follows
_WARMING, _DECAY = 0.05, 0.1
_CHOOSING = 0.1  # of the rows, the last ones: those that tell whether it helps


def learn(bridge: Bridge, hidden: Tensor, wanted: Tensor) -> float:
    """Fit a bridge's map, then map and MLP together by gradient (AdamW, arXiv 1711.05101) on the squared error.

    Where that is no better on rows that neither was fitted to, the map stands alone.

    Args:
        bridge: in float32.
        hidden: ``[n, H]`` float32: what it reads.
        wanted: ``[n, H]`` float32: what it should give.

    Returns:
        The ridge constant.
    """
    rows = hidden.shape[0] - int(_CHOOSING * hidden.shape[0])
    chosen = regress(bridge, hidden[:rows], wanted[:rows])
    known = {name: tensor.clone() for name, tensor in bridge.state_dict().items()}
    alone = squared_error(bridge, hidden[rows:], wanted[rows:], _BATCH)
    with torch.inference_mode(False), torch.enable_grad():
        _descend(bridge, hidden[:rows], wanted[:rows])
    if squared_error(bridge, hidden[rows:], wanted[rows:], _BATCH) < alone:
        return chosen
    bridge.load_state_dict(known)
    del known  # the regression takes much
    return regress(bridge, hidden, wanted)


def learning_bytes(rows: int, hidden: int, width: int) -> int:
    """What :func:`learn` takes beside what it reads and should give, once the map alone is there; 0 without an MLP.

    Args:
        rows: n.
        hidden: H.
        width: of the MLP.
    """
    if not width:
        return 0
    numbers = hidden * (hidden + 1 + 3 * width)
    return 24 * numbers + 4 * min(rows, _BATCH) * (8 * hidden + 6 * width)  # AdamW, and what the map alone was


def _descend(bridge: Bridge, hidden: Tensor, wanted: Tensor) -> None:
    rows = hidden.shape[0]
    turns = max(1, rows // _BATCH)
    scale = float(wanted.square().mean()) or 1.0
    mlp = [parameter for name, parameter in bridge.named_parameters() if name in ("gate", "value", "out")]
    others = [parameter for name, parameter in bridge.named_parameters() if name not in ("gate", "value", "out")]
    rates = (_MLP_RATE, _MAP_RATE)
    optimiser = torch.optim.AdamW([{"params": mlp}, {"params": others}], weight_decay=_DECAY)
    generator = torch.Generator().manual_seed(0)
    for step in range(_EPOCHS * turns):
        if step % turns == 0:
            order = torch.randperm(rows, generator=generator)
        share = share_of_rate(step / (_EPOCHS * turns), _WARMING)
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * share
        some = order[step % turns * _BATCH :][:_BATCH].to(hidden.device)
        loss = (bridge(hidden[some]) - wanted[some]).square().mean() / scale
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

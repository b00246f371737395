"""What does an output layer say of some hidden states, beside what it says of the target's own? In portions.

Over a whole vocabulary, logits and their gradients are by far the largest tensors of a training, and a few rows of them at a
time stay in a processor's caches. Distillation: arXiv 1503.02531, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from layerskip.heads.readout import Readout

_ROWS = 128  # at a time
_ROWS_ON_DEVICES = 2048


def cross_entropy(readout: Readout, made: Tensor, final: Tensor) -> Tensor:
    """The mean cross entropy of what is said of some hidden states to what is said of the target's own.

    Args:
        readout: an output layer, which takes no gradient.
        made: ``[n, H]``, n at least 1; takes one.
        final: ``[n, H]`` of the target, which takes none.

    Returns:
        float32 scalar.
    """
    found: Tensor = _CrossEntropy.apply(made, final, readout)  # type: ignore[no-untyped-call]
    return found


@torch.no_grad()
def drafted(readout: Readout, made: Tensor) -> Tensor:
    """``[n]`` int64: the tokens that are said most likely of ``[n, H]`` hidden states."""
    places = torch.cat([readout(some).argmax(-1) for (some,) in _portions(readout, made)])
    return places if readout.tokens is None else readout.tokens[places]


class _CrossEntropy(torch.autograd.Function):
    """Makes the gradient together with the loss, so that no portion is needed again."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, final: Tensor, readout: Readout) -> Tensor:
        """Of a mean, so that every row's share is known at once."""
        total = torch.zeros((), device=made.device)
        gradients: list[Tensor] = []
        for some, own in _portions(readout, made.detach(), final):
            wanted = readout(own).float().softmax(-1)
            with torch.enable_grad():
                some.requires_grad_()
                loss = -(wanted * readout(some).float().log_softmax(-1)).sum() / made.shape[0]
                gradients += torch.autograd.grad(loss, some)
            total += loss.detach()
        ctx.save_for_backward(torch.cat(gradients).to(made.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *outside: Any) -> Any:
        """Of the hidden states alone."""
        (gradient,) = ctx.saved_tensors
        return gradient * outside[0], None, None


def _portions(readout: Readout, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    size = _ROWS if rows[0].device.type == "cpu" else _ROWS_ON_DEVICES
    return zip(*(torch.split(some.to(readout.weight.dtype), size) for some in rows), strict=True)

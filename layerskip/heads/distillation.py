"""The distillation loss (arXiv 1503.02531, section 2) of predicted hidden states, computed a few rows at a time.

Over a whole vocabulary, logits and their gradients are by far the largest tensors of a training. A few rows of them at a
time stay in a processor's caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from layerskip.heads.readout import Readout

_ROWS = 128  # at a time on a CPU
_ROWS_ON_DEVICES = 2048


def cross_entropy(readout: Readout, hidden: Tensor, target_hidden: Tensor) -> Tensor:
    """Return the mean cross entropy of the predicted token distributions to the target's, a float32 scalar.

    Args:
        readout: the output layer; takes no gradient.
        hidden: ``[n, H]`` predicted hidden states, n >= 1; takes a gradient.
        target_hidden: ``[n, H]`` hidden states of the target; takes no gradient.
    """
    loss: Tensor = _CrossEntropy.apply(hidden, target_hidden, readout)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def most_likely_tokens(readout: Readout, hidden: Tensor) -> Tensor:
    """Return ``[n]`` int64: the most likely token of each of ``[n, H]`` hidden states."""
    places = torch.cat([readout(some).argmax(-1) for (some,) in _portions(readout, hidden)])
    return places if readout.tokens is None else readout.tokens[places]


class _CrossEntropy(torch.autograd.Function):
    """The loss with its gradient, computed together, so that no logits have to be kept or recomputed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, target_hidden: Tensor, readout: Readout) -> Tensor:
        """Return the mean loss, and keep the gradient of every row."""
        total = torch.zeros((), device=hidden.device)
        gradients: list[Tensor] = []
        for some, target_some in _portions(readout, hidden.detach(), target_hidden):
            wanted = readout(target_some).float().softmax(-1)
            with torch.enable_grad():
                some.requires_grad_()
                loss = -(wanted * readout(some).float().log_softmax(-1)).sum() / hidden.shape[0]
                gradients += torch.autograd.grad(loss, some)
            total += loss.detach()
        ctx.save_for_backward(torch.cat(gradients).to(hidden.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return the gradient of the predicted hidden states alone."""
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0], None, None


def _portions(readout: Readout, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    size = _ROWS if rows[0].device.type == "cpu" else _ROWS_ON_DEVICES
    return zip(*(torch.split(some.to(readout.weight.dtype), size) for some in rows), strict=True)

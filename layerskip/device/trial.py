"""Trials of fast computations: each is compared with torch's own operators before it is used."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from layerskip.device.transfer import waiting

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether the kernels' compiler is installed; torch's builds for CUDA bring it along."""
_passed: dict[tuple[str, Hashable], bool] = {}
_log = logging.getLogger(__name__)


def nearly_equal(tensor: Tensor, reference: Tensor, tolerance: float | None = None) -> bool:
    """Return whether two tensors are equal up to a tolerance, relative to the largest entry of ``reference``.

    By default, the tolerance is that of rounding in their dtype.
    Empty tensors are equal. Infinities, as the logits of unused tokens are, must be in the same places; NaN equals nothing.
    """
    if not reference.numel():
        return True
    if tolerance is None:
        tolerance = 1e-4 if tensor.dtype == torch.float32 else 6e-2
    found, expected = tensor.float(), reference.float()
    scale = expected.masked_fill(expected.isinf(), 0.0).abs().amax().clamp_min(1e-6)
    differences = (found - expected).masked_fill(found.isinf() & (found == expected), 0.0)
    return bool(differences.abs().amax() <= tolerance * scale)


def first_line(error: BaseException) -> str:
    """Return the first line of an error, with the next one if the first only introduces it; its type if it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def passes_trial(name: str, kind: Hashable, run: Callable[[], tuple[Tensor, Tensor]]) -> bool:
    """Return whether a kernel works. Each kind of input is tried when it first occurs in a process; a failure is logged.

    ``run`` returns the kernel's output and the expected one.
    """
    if (name, kind) not in _passed:
        try:
            with waiting("default"):
                reason = "" if nearly_equal(*run()) else "it gives other results"
        except Exception as error:  # compilers raise errors of many kinds
            reason = first_line(error)
            _log.debug("the kernel for %s fails", name, exc_info=error)
        if reason:
            _log.warning("the kernel for %s cannot be used (%s): %s", name, kind, reason)
        _passed[name, kind] = not reason
    return _passed[name, kind]

"""Trials of fast computations: each is compared with torch's own operators, and timed against them, before it is used."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerskip.device.memory import is_out_of_memory
from layerskip.device.transfer import waiting

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether the kernels' compiler is installed; torch's builds for CUDA bring it along."""
_AMPERE = (8, 0)
"""Compute capability; on earlier GPUs Triton 3.7 multiplies without matrix instructions and spills kilobytes a thread."""
_TURNS = 3
_CALLS = 20
_SLEEP_CYCLES = 10_000_000  # some 5 ms
_OVERWRITTEN = 2**27  # bytes, more than the cache of a GPU
_NOISE = 1.05
_passed: dict[tuple[str, Hashable], bool] = {}
_log = logging.getLogger(__name__)

Compute = Callable[..., Tensor]
"""A computation on the GPU."""


def nearly_equal(tensor: Tensor, reference: Tensor, tolerance: float | None = None) -> bool:
    """Return whether two tensors are equal up to a tolerance, relative to the largest entry of ``reference``.

    By default, it is that of rounding in their dtype. Infinities must be in the same places; NaN equals nothing.
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


def runs_kernels(tensor: Tensor) -> bool:
    """Return whether the GPU of a tensor runs Triton's kernels well; False for a tensor that is not on a GPU."""
    return HAS_TRITON and tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= _AMPERE


def faster_of_right(
    name: str, kind: Hashable, kernel: Compute, operators: Compute, draw: Callable[[], Sequence[Any]]
) -> Compute:
    """Return a kernel, or torch's operators for the same where the kernel gives other results, fails or takes longer.

    Each kind of input is tried once in a process, with the inputs that ``draw`` returns. A kernel that fails is logged.
    """
    if (name, kind) not in _passed:
        try:
            with waiting("default"):
                given = draw()
                found = kernel(*given)
                reason = "" if nearly_equal(found, operators(*given)) else "it gives other results"
                is_slower = not reason and found.is_cuda and _is_slower(kernel, operators, given, found.device)
        except Exception as error:  # compilers raise errors of many kinds
            if is_out_of_memory(error):
                raise  # which says nothing about the kernel
            reason, is_slower = first_line(error), False
            _log.debug("the kernel for %s fails", name, exc_info=error)
        if reason:
            _log.warning("the kernel for %s cannot be used (%s): %s", name, kind, reason)
        elif is_slower:
            _log.debug("the kernel for %s is slower than torch's operators (%s)", name, kind)
        _passed[name, kind] = not (reason or is_slower)
    return kernel if _passed[name, kind] else operators


def _is_slower(kernel: Compute, operators: Compute, given: Sequence[Any], device: torch.device) -> bool:
    """Return whether a kernel takes longer than torch's operators, by the fastest of a few turns and more than noise."""
    turns = [(queued_seconds(kernel, given, device), queued_seconds(operators, given, device)) for _ in range(_TURNS)]
    return min(own for own, _ in turns) > _NOISE * min(others for _, others in turns)


def queued_seconds(compute: Compute, given: Sequence[Any], device: torch.device) -> float:
    """Return the seconds of a GPU for a call, the mean of some that all wait in its queue, as those of a captured pass do.

    The cache of the GPU is overwritten before each, because a pass reads every weight once.
    """
    with torch.cuda.device(device):
        overwritten = torch.empty(_OVERWRITTEN, dtype=torch.uint8, device=device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_CALLS)]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]  # until the calls are launched
        for begin, end in events:
            overwritten.zero_()
            begin.record()
            compute(*given)
            end.record()
        torch.cuda.synchronize()
    return sum(float(begin.elapsed_time(end)) for begin, end in events) / 1000 / _CALLS

"""Copies between the host and a device, waits for a device, and the library's only clock."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def copy_to_device(values: Tensor | Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy a host tensor, or integers as int64 ``[n]`` or ``[n, m]``, to a device without waiting for it."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def begin_reading(tensor: Tensor) -> Callable[[], Any]:
    """Begin to copy a tensor to the host; return a function that waits for this copy alone and returns nested lists."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(tensor.device))

    def read() -> Any:
        copied.synchronize()
        return host.tolist()

    return read


def read_to_host(*tensors: Tensor) -> list[Any]:
    """Return the values of int64 or floating tensors of a device as nested lists, in one wait, which can be counted."""
    if len(tensors) == 1 or tensors[0].device.type == "cpu":
        return [part.tolist() for part in tensors]
    return _read_packed(tensors)


def _read_packed(tensors: Sequence[Tensor]) -> list[Any]:
    """Read tensors in one copy of 8-byte words; float64 holds every value of the other floating dtypes."""
    words = [part.double().view(torch.int64) if part.is_floating_point() else part for part in tensors]
    copies = torch.split(torch.cat([part.reshape(-1) for part in words]).cpu(), [part.numel() for part in words])
    return [
        (copy.view(torch.float64) if part.is_floating_point() else copy).view(part.shape).tolist()
        for copy, part in zip(copies, tensors, strict=True)
    ]


def now(device: torch.device) -> float:
    """Wait until a device has finished its work, then return the clock in seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def waiting(mode: str) -> Iterator[None]:
    """Refuse operations that wait for a GPU within the ``with`` block, for ``error``, or allow them, for ``default``."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    try:
        _forbid_waiting(mode)
        yield
    finally:
        _forbid_waiting(before)


def _forbid_waiting(mode: str | int) -> None:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch warns that not all waits are found
        torch.cuda.set_sync_debug_mode(mode)

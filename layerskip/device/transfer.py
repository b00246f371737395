"""Copies between the host and a device, waits for a device, and the library's only clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COPIES = ("_to_copy", "copy_")
_SHAPES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


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


class DeviceWait(RuntimeError):
    """An operation waits for its device, which a CUDA graph cannot."""


class NoWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations of this thread that wait for a GPU within the ``with`` block, with a :class:`DeviceWait`.

    Torch's own mode for this holds for all threads. Kernels of custom operators may wait, as their first calls do.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else other threads would not find their compiled functions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode, torch's own decomposition comes after this
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        tensors = [part for part in tree_leaves((args, kwargs, result)) if isinstance(part, Tensor)]
        if any(map(_is_remote, tensors)) and _waits(func, name, args, kwargs or {}, tensors):
            raise DeviceWait(f"{name} waits for the device")
        return result


def _is_remote(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _waits(func: Any, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> bool:
    """Return whether a call reads a value or a shape that is known on the device only, or waits for a copy."""
    if name in _COPIES:
        return len({part.device for part in tensors}) > 1 and not kwargs.get("non_blocking", args[2:] == (True,))
    if name == "lift_fresh":  # values that Python gives, after their copy
        return True
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        # A single value under a mask is filled in.
        fills = name != "index" and args[2].numel() == 1 and args[3:] != (True,)
        places = [place for place in args[1] if place is not None]
        is_mask = [place.dtype in (torch.bool, torch.uint8) for place in places]
        return (any(is_mask) and not fills) or any(place.device != args[0].device for place in places)
    return name == "equal" or (bool(_SHAPES & {*func.tags}) and kwargs.get("output_size") is None)

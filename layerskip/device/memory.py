"""Memory measurements: peaks, limits, and errors that mean "out of memory"."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_GROUPS = Path("/proc/self/cgroup")
_LIMITS = Path("/sys/fs/cgroup")
Result = TypeVar("Result")
_releases: list[Callable[[], None]] = []


class PeakMemory:
    """The peak memory of a GPU, or of the process, since the creation of this object.

    Where it cannot be reset, it is that since the process started; outside Linux, what the process takes when it is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):
                _CLEAR.write_text("5")  # proc(5): resets VmHWM to the current resident set

    def read(self) -> int:
        """Return the peak since creation, in bytes."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        try:
            lines = _STATUS.read_text().splitlines()
        except OSError:
            return int(psutil.Process().memory_info().rss)
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def total_bytes() -> int:
    """Return the bytes that this process may use: the machine's, or the lowest limit of its control groups."""
    limits = [int(psutil.virtual_memory().total)]
    with contextlib.suppress(OSError):
        for line in _GROUPS.read_text().splitlines():
            number, controllers, group = line.split(":", 2)
            if number == "0":
                root, name = _LIMITS, "memory.max"
            elif controllers == "memory":  # cgroups version 1
                root, name = _LIMITS / "memory", "memory.limit_in_bytes"
            else:
                continue
            path = root / group.lstrip("/")
            for folder in (path, *path.parents):
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    limits.append(int((folder / name).read_text()))
    return min(limits)


def device_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU, or on another device those that this process may use."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else total_bytes()


def release_memory() -> None:
    """Free caches and unreferenced objects; only after an ``except`` block, as a handled error keeps its objects."""
    for release in _releases:
        release()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def on_memory_release(release: Callable[[], None]) -> None:
    """Register a function that drops a cache; :func:`release_memory` calls it."""
    _releases.append(release)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on a GPU or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(words in str(error) for words in ("allocate memory", "out of memory"))  # the CUDA driver has no class


def within_memory(work: Callable[[], Result]) -> Result | None:
    """Return the result of some work; None, with memory released, if memory does not suffice."""
    try:
        return work()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    release_memory()  # only here: the handled error refers to the memory
    return None

"""Memory measurements: peaks, allocations, and errors that mean "out of memory".

A peak is the device's own on CUDA, and that of the whole process on a CPU.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_GROUPS = Path("/proc/self/cgroup")
_LIMITS = Path("/sys/fs/cgroup")
Result = TypeVar("Result")
_releases: list[Callable[[], None]] = []


class PeakMemory:
    """The peak memory since the creation of this object; on a CPU outside Linux, since the process started."""

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
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


class AllocationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A count of the bytes of tensors that operations create within a ``with`` block, gradients included, and of their peak.

    Views of tensors that can be reached from ``existing`` objects are not counted, and temporary memory in a kernel is not
    seen.
    """

    def __init__(self, existing: Iterable[object] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {address for thing in existing for address in _storages(thing)}
        self._current = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if (address := storage.data_ptr()) not in self._known:
                    self._known.add(address)
                    self._current += storage.nbytes()
                    self.peak = max(self.peak, self._current)
                    weakref.finalize(storage, self._discount, address, storage.nbytes()).atexit = False
        return result

    def _discount(self, address: int, size: int) -> None:
        self._known.remove(address)
        self._current -= size


def _storages(thing: object) -> Iterator[int]:
    """Return the address of every tensor storage that can be reached; of functions, only the closures are followed."""
    pending: list[Any] = [thing]
    seen: dict[int, Any] = {}
    while pending:
        obj = pending.pop()
        if id(obj) in seen or isinstance(obj, (type, ModuleType)):
            continue
        seen[id(obj)] = obj  # kept alive, so that no other object gets the same id
        if isinstance(obj, FunctionType):
            pending += obj.__closure__, obj.__defaults__
        elif not isinstance(obj, Tensor):
            pending += filter(gc.is_tracked, gc.get_referents(obj))
        elif obj.layout == torch.strided:  # oneDNN's layouts have no storage
            yield obj.untyped_storage().data_ptr()


def total_bytes() -> int:
    """Return the bytes that this process may use: the machine's, or the lowest limit of its control groups."""
    return min([int(psutil.virtual_memory().total), *_group_limits()])


def device_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU, or on another device those that this process may use."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else total_bytes()


def _group_limits() -> Iterator[int]:
    with contextlib.suppress(OSError):
        for line in _GROUPS.read_text().splitlines():
            number, _, group = line.split(":", 2)
            path = _LIMITS / group.lstrip("/")
            for folder in (path, *path.parents) if number == "0" else ():  # the others are of cgroups version 1
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    yield int((folder / "memory.max").read_text())


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

"""Memory measurements: bytes that an object holds, peaks, and errors that mean "out of memory".

An object holds the tensors that can be reached from it, on any device; files mapped into memory are not counted. A peak is
the device's own on CUDA, and that of the whole process on a CPU.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor
from torch.nn import Module
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
        self._allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
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

    def growth(self) -> int | None:
        """Return the peak less the bytes allocated at creation; None on a CPU, where this cannot be measured."""
        return None if self._allocated is None else self.read() - self._allocated


class AllocationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A count of the bytes of tensors that operations create within a ``with`` block, gradients included, and of their peak.

    Views of tensors that can be reached from ``existing`` objects are not counted, and temporary memory in a kernel is not
    seen.
    """

    def __init__(self, existing: Iterable[object] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {address for thing in existing for address, _ in _storages(thing)}
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


def tensor_bytes(thing: object, beside: Iterable[object] = ()) -> int:
    """Return the bytes of the tensors that can be reached from an object but not from those ``beside`` it, each once."""
    shared = {address for other in beside for address, _ in _storages(other)}
    return sum(size for address, size in set(_storages(thing)) if address not in shared)


def python_bytes(thing: object, beside: Iterable[object] = ()) -> int:
    """Return the bytes of the Python objects that can be reached from an object, such as n-gram tables, each counted once.

    Models, the closures of functions, and the objects ``beside`` it are not counted.
    """
    excluded = (FunctionType, MethodType, Module, Tensor)
    return sum(map(sys.getsizeof, _reachable(thing, gc.get_referents, excluded, beside)))


def _storages(thing: object) -> Iterator[tuple[int, int]]:
    """Return address and bytes of every tensor storage that can be reached; of functions, only the closures are followed."""

    def referents(obj: Any) -> Iterable[Any]:
        if isinstance(obj, FunctionType):
            return obj.__closure__, obj.__defaults__
        return () if isinstance(obj, Tensor) else filter(gc.is_tracked, gc.get_referents(obj))

    for obj in _reachable(thing, referents):
        if isinstance(obj, Tensor):
            strided = obj.layout == torch.strided  # oneDNN's layouts have no storage
            yield (obj.untyped_storage().data_ptr(), obj.untyped_storage().nbytes()) if strided else (id(obj), obj.nbytes)


def _reachable(
    thing: object, referents: Callable[[Any], Iterable[Any]], excluded: tuple[type, ...] = (), beside: Iterable[object] = ()
) -> Iterator[Any]:
    """Return all objects that can be reached from one, each once, except types, modules and excluded types."""
    pending: list[Any] = [thing]
    seen: dict[int, Any] = {id(other): other for other in beside}
    while pending:
        obj = pending.pop()
        if id(obj) in seen or isinstance(obj, (type, ModuleType, *excluded)):
            continue
        seen[id(obj)] = obj  # kept alive, so that no other object gets the same id
        yield obj
        pending += referents(obj)


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

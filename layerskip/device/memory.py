"""How much memory does something hold, how much did it need at its peak, or did it run out?

What an object holds are its tensors, on any device; tables and indexes made of Python objects, and files mapped into memory,
are left out. A peak is the device's on CUDA, where it tells what decoding took; on a CPU it is that of the whole process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_LIMIT = Path("/sys/fs/cgroup/memory.max")


class PeakMemory:
    """Watches from its creation on.

    Where the kernel cannot restart its high-water mark (outside Linux), a CPU reading is the process's peak so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):
                _CLEAR.write_text("5")  # proc(5): resets VmHWM to the current resident set

    def read(self) -> int:
        """The peak since creation, in bytes."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        try:
            lines = _STATUS.read_text().splitlines()
        except OSError:
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

    def grown(self) -> int | None:
        """How far the peak lies above what was allocated at creation, in bytes; None on a CPU, where nobody can tell."""
        return None if self._before is None else self.read() - self._before


class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch makes while a block runs, gradients included; what a kernel takes for itself it does not see.

    Args:
        beside: what was there before; views of tensors that can be reached from there are nothing new.

    Attributes:
        most: bytes of what there was of it at one time, at most.
    """

    def __init__(self, beside: Iterable[object] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._beside = {storage for thing in beside for storage, _ in _storages(thing)}
        self._sizes: dict[int, int] = {}
        self._now, self.most = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self._note(tensor.untyped_storage())
        return found

    def _note(self, storage: torch.UntypedStorage) -> None:
        place = storage.data_ptr()
        if place in self._beside or place in self._sizes:
            return
        self._sizes[place] = storage.nbytes()
        self._now += storage.nbytes()
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._gone, place).atexit = False

    def _gone(self, place: int) -> None:
        self._now -= self._sizes.pop(place)


def held_bytes(thing: object, beside: Iterable[object] = ()) -> int:
    """Bytes of the tensors that can be reached from an object, each storage once.

    Args:
        thing: anything, such as a drafter.
        beside: what was there without it; tensors that can be reached from there count nothing.
    """
    shared = {storage for other in beside for storage, _ in _storages(other)}
    return sum(size for storage, size in set(_storages(thing)) if storage not in shared)


def _storages(thing: object) -> Iterator[tuple[int, int]]:
    """Address and bytes of every storage that can be reached; of a function only what it encloses."""

    def behind(found: Any) -> Iterable[Any]:
        if isinstance(found, FunctionType):
            return found.__closure__, found.__defaults__
        return () if isinstance(found, Tensor) else filter(gc.is_tracked, gc.get_referents(found))

    for found in _reached(thing, behind):
        if isinstance(found, Tensor) and found.layout != torch.strided:  # such as what oneDNN laid out: it has no storage
            yield id(found), found.nbytes
        elif isinstance(found, Tensor):
            storage = found.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()


def _reached(
    thing: object, behind: Callable[[Any], Iterable[Any]], leave: tuple[type, ...] = (), beside: Iterable[object] = ()
) -> Iterator[Any]:
    """All that can be reached from an object, each once, but through types, modules and what is left out."""
    waiting: list[Any] = [thing]
    seen: dict[int, Any] = {id(one): one for one in beside}
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, (type, ModuleType, *leave)):
            continue
        seen[id(found)] = found  # alive, so that no other object takes its id
        yield found
        waiting += behind(found)


def table_bytes(thing: object, beside: Iterable[object] = ()) -> int:
    """Bytes of the Python objects that can be reached from an object, such as tables of n-grams, each once.

    Args:
        thing: anything, such as a drafter; models in it, and what functions enclose, are left out.
        beside: what was there without it, which is left out, too.
    """
    leave = (FunctionType, MethodType, Module, Tensor)
    return sum(map(sys.getsizeof, _reached(thing, gc.get_referents, leave, beside)))


def total_bytes() -> int:
    """The memory that this process may use: the machine's, or what its control group is held to."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        found = min(found, int(_LIMIT.read_text()))
    return found


def release() -> None:
    """Give back what nothing holds any more; not while an error that it was lost in is handled, as that holds it."""
    for let_go in _held:
        let_go()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def on_release(let_go: Callable[[], None]) -> None:
    """Have something that is only kept for later be let go of when memory is to be given back."""
    _held.append(let_go)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a card or on the host."""
    told = "allocate memory" in str(error) or "out of memory" in str(error)  # the driver's own has no class of its own
    return told or isinstance(error, (MemoryError, torch.OutOfMemoryError))


_held: list[Callable[[], None]] = []

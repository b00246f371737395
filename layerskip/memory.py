"""How much memory did something need at its peak, or did it run out? Device memory on CUDA, the process's on a CPU."""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """Watches from its creation on.

    Where the kernel cannot restart its high-water mark (outside Linux), a CPU reading is the process's peak so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
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


def release() -> None:
    """Give back what nothing holds any more; not while an error that it was lost in is handled, as that holds it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a card or on the host."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)

"""Memory, disks and garbage in processes of tests."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Callable
from pathlib import Path


def fill(folder: Path, leave: int) -> None:
    """Fill the file system of a folder with a file ``ballast``, except for ``leave`` bytes."""
    stats = os.statvfs(folder)
    # Another writer may take the last bytes first, which also fills the disk.
    with contextlib.suppress(OSError), (folder / "ballast").open("wb") as ballast:
        ballast.write(b"0" * max(0, stats.f_bavail * stats.f_frsize - leave))


def keep_imports() -> None:
    """Exclude all imported objects from garbage collection, which would scan them again and again, and collect less often.

    So few other objects are left that Python would look through all of them all the time. Tests that need a collection ask
    for one.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def peak_bytes(work: Callable[[], object]) -> int:
    """The peak of the bytes that ``work`` allocates on the CPU, according to torch's profiler."""
    from torch.profiler import ProfilerActivity, profile  # not by the process that starts the workers

    gc.collect()  # earlier garbage must not be freed, and subtracted, while ``work`` runs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))

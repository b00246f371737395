"""How much memory do tensors take at once?"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that was allocated on the CPU at any time while ``work`` ran, as torch's profiler counts it."""
    gc.collect()  # what was dropped before must not be freed, and taken off, while ``work`` runs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        work()
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))

"""Peak memory of a function, from torch's profiler."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """The peak of the bytes that ``work`` allocates on the CPU, according to torch's profiler."""
    gc.collect()  # earlier garbage must not be freed, and subtracted, while ``work`` runs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))

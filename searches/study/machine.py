"""The machine of a search: what it is, whether others use it, and the number of threads that decodes fastest on it."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Sequence

import psutil
import torch

from layerskip import Target
from layerskip.costs.timing import VerifyPass, seconds_of
from layerskip.device.memory import device_bytes
from layerskip.device.transfer import now
from layerskip.models.environment import machine
from layerskip.models.loading import choose_dtype

_TEST_SECONDS = 0.4
_BUSY = 10.0  # per cent of the cores' time
_CONTEXT = 64  # tokens before the passes that are timed
_VERIFIED = 8  # tokens of the longer one
_ROUNDS = 5
_GAIN = 1.05  # that fewer threads must bring, since timing few passes is noisy
_READ_BYTES, _READS = 2**30, 4
_THREADS_SET = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def describe(target: Target, dtype: str) -> str:
    """Return one line on the machine and its threads and memory, and why a data type is used for ``dtype``."""
    about = machine(target)
    where = str(about["device_name"])
    if about["device"] == "cpu":
        isa = torch.backends.cpu.get_cpu_capability()
        where += f" ({isa}, {len(usable_cores())} cores, threads: {about['threads']})"
    _, reason = choose_dtype(dtype, target.device)
    weights = target.describe().get("weights")
    if dtype == "auto" and weights is not None:
        reason = "layerskip/kernels/cpu.cpp computes with it"
    dtypes = target.dtype if weights is None else f"{target.dtype} (weights in {weights})"
    return f"machine: {where}, {device_bytes(target.device) / 2**30:.0f} GiB of memory; {dtypes}, because {reason}"


def busy_line() -> str | None:
    """Return a warning if others use the processor, or did by the load average; takes less than a second."""
    each, load = psutil.cpu_percent(_TEST_SECONDS, percpu=True), psutil.getloadavg()[0]
    used = statistics.fmean(each[core] for core in usable_cores())
    if used <= _BUSY and load <= len(each):
        return None
    return f"busy: others use {used:.0f} % of the cores, load average {load:.1f}; figures are noisy, intervals will be wide"


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def set_threads(target: Target, wanted: int | None) -> str | None:
    """Set the number of threads of the CPU, and return a line if a measurement chose fewer than torch's own number.

    Barriers wait for the slowest thread, so one busy core slows all threads down. ``wanted=None`` measures all threads, all
    but one, and half of them, unless an environment variable sets the number or the target is on another device.
    """
    if wanted is not None:
        torch.set_num_threads(wanted)
        return None
    usual = torch.get_num_threads()
    counts = sorted({usual, usual - 1, usual // 2} - {0}, reverse=True)
    if target.device.type != "cpu" or len(counts) < 2 or any(os.environ.get(name) for name in _THREADS_SET):
        return None
    seconds = _time_threads(target, counts)
    best = min(counts, key=lambda count: seconds[count] * (1.0 if count == usual else _GAIN))
    torch.set_num_threads(best)
    if best == usual:
        return None
    return (
        f"threads: {best}, because {usual} take {seconds[usual] / seconds[best]:.2f} times as long; study.threads sets them"
    )


@torch.inference_mode()
def _time_threads(target: Target, counts: Sequence[int]) -> dict[int, float]:
    """Return the median seconds of a short and a longer pass for each number of threads, in random order."""
    passes, order = VerifyPass(target, _CONTEXT, _VERIFIED), random.Random(0)
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(_ROUNDS):
        for count in order.sample(counts, len(counts)):
            torch.set_num_threads(count)
            passes.chain(0)  # threads are started with the first pass
            start = now(target.device)
            passes.chain(0)
            passes.chain(_VERIFIED)
            seconds[count].append(now(target.device) - start)
    return {count: statistics.median(times) for count, times in seconds.items()}


def read_gigabytes_per_second(device: torch.device) -> float | None:
    """Return how fast a device sums a gigabyte, which reads its memory; None if it has none left."""
    try:
        values = torch.ones(_READ_BYTES // 4, device=device)
    except (MemoryError, torch.OutOfMemoryError):
        return None
    return _READ_BYTES / min(seconds_of(device, values.sum) for _ in range(_READS)) / 1e9

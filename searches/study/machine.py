"""The machine of a search: what it is, whether others use it, its fastest number of threads, and costs for cascades.

The costs of verification and drafting, by which cascades choose, are measured once for a study or a benchmark.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import optuna
import psutil
import torch

from layerskip import Sampling, SpeculativeConfig, Target
from layerskip.config import Costs, methods
from layerskip.costs.cost_model import in_steps
from layerskip.costs.timing import VerifyPass, seconds_of, time_drafting, time_verification
from layerskip.device.memory import device_bytes, within_memory
from layerskip.device.transfer import now
from layerskip.models.environment import machine
from layerskip.models.loading import choose_dtype
from searches.space.search_space import DraftCost

_TEST_SECONDS = 0.4
_BUSY = 10.0  # per cent of the cores' time
_CONTEXT = 64  # tokens before the passes that are timed
_VERIFIED = 8  # tokens of the longer one
_ROUNDS = 5
_GAIN = 1.05  # that fewer threads must bring, since timing few passes is noisy
_READ_BYTES, _READS = 2**30, 4
_THREADS_SET = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_VERIFY_COST = "verify_cost"
_DRAFT_COST = "draft_cost"
_REPEATS = 5

Configs = Sequence[SpeculativeConfig]


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


@dataclass(frozen=True)
class CostTimer:
    """Measurement of costs in steps of plain decoding, after a number of tokens (``context``)."""

    target: Target
    sampling: Sampling
    context: int
    seed: int

    def verify_costs(self) -> Costs:
        seconds = time_verification(self.target, self.context, sampling=self.sampling, repeats=_REPEATS, seed=self.seed)
        return in_steps(seconds)

    def draft_costs(self, members: Configs, known: dict[str, float]) -> Costs:
        """Return the cost of one drafted token for each member of a cascade: 0.0 for lookups; empty if all are lookups.

        New measurements are added to ``known``.
        """
        if all(methods()[member.method].lookup for member in members):
            return ()
        return tuple(0.0 if methods()[member.method].lookup else self._draft_cost(member, known) for member in members)

    def _draft_cost(self, member: SpeculativeConfig, known: dict[str, float]) -> float:
        fields = member.to_dict() | {"stop": member.stop.method}
        if not member.head:  # the cost of a chain depends neither on its length nor on a threshold
            fields.pop("num_speculative_tokens", None)
        key = " ".join(f"{name}={value}" for name, value in fields.items() if value)
        if key not in known:
            known[key] = time_drafting(self.target, member, self.context, self.sampling, seed=self.seed)
        return known[key]


def verify_cost(study: optuna.Study, measure: Callable[[], Costs]) -> Costs:
    """Return the verification costs of a study's cascades, stored, since other numbers would make other configurations."""
    if _VERIFY_COST not in study.user_attrs:
        study.set_user_attr(_VERIFY_COST, list(measure()))
    return tuple(study.user_attrs[_VERIFY_COST])


def draft_cost(
    study: optuna.Study,
    measure: Callable[[Configs, dict[str, float]], Costs],
    claim: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> DraftCost:
    """Return a function from a cascade's members to their drafting costs, measured on first use, and stored."""

    def costs_of(members: Configs) -> Costs:
        with claim():
            known = study.user_attrs.get(_DRAFT_COST, {})
            before = len(known)
            costs = within_memory(lambda: measure(members, known))
            if len(known) > before:
                study.set_user_attr(_DRAFT_COST, known)
            return costs or ()  # the trial that decodes a cascade reports that memory does not suffice

    return costs_of

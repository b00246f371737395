"""Peak memory, against allocations of known size."""

from __future__ import annotations

import functools
import gc
import os
from pathlib import Path

import pytest
import torch

from layerskip.memory import PeakMemory, held_bytes

MEBIBYTE = 2**20


def _resident() -> int:
    """This process's resident bytes, as the kernel counts them."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _allocate(device: str, size: int) -> None:
    torch.ones(size, dtype=torch.uint8, device=device)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux restarts its high-water mark")
def test_the_peak_counts_what_was_freed_again_and_nothing_from_before() -> None:
    gc.collect()  # what other tests have left would fall below what is allocated here
    _allocate("cpu", 300 * MEBIBYTE)
    memory, before = PeakMemory(torch.device("cpu")), _resident()
    assert memory.read() < before + 100 * MEBIBYTE
    _allocate("cpu", 200 * MEBIBYTE)
    assert 190 * MEBIBYTE < memory.read() - before < 260 * MEBIBYTE


def test_a_processes_peak_is_at_least_what_it_holds_now() -> None:
    memory = PeakMemory(torch.device("cpu"))
    kept = torch.ones(50 * MEBIBYTE, dtype=torch.uint8)
    assert memory.read() >= kept.numel()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_device_memory_counts() -> None:
    kept = torch.ones(10 * MEBIBYTE, dtype=torch.uint8, device="cuda")
    memory = PeakMemory(torch.device("cuda"))
    before = torch.cuda.memory_allocated()
    _allocate("cuda", 64 * MEBIBYTE)
    assert memory.read() == before + 64 * MEBIBYTE
    assert before >= kept.numel()
    assert memory.grown() == 64 * MEBIBYTE


def test_on_a_cpu_nobody_can_tell_what_decoding_took() -> None:
    assert PeakMemory(torch.device("cpu")).grown() is None


def test_what_is_held_is_counted_once_and_not_what_was_there_before() -> None:
    class Slotted:
        __slots__ = ("inside",)

    weight, shared = torch.zeros(1000), torch.zeros(500)
    slotted = Slotted()
    slotted.inside = [weight[10:20], {"same": (weight.view(10, 100),)}]  # type: ignore[attr-defined]
    module = torch.nn.Linear(4, 2)
    module.forward = lambda x: x + shared.sum()  # type: ignore[method-assign, assignment, misc]
    thing = [slotted, module, functools.partial(torch.add, torch.ones(7))]
    thing.append(thing)  # type: ignore[arg-type]
    own = 4 * (1000 + 4 * 2 + 2 + 7)
    assert held_bytes(thing) == own + 4 * 500
    assert held_bytes(thing, beside=[{"there": shared}]) == own
    assert held_bytes(None) == 0

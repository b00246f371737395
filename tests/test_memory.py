"""Peak memory, against allocations of known size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from layerskip.memory import PeakMemory

MEBIBYTE = 2**20


def _resident() -> int:
    """This process's resident bytes, as the kernel counts them."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _allocate(device: str, size: int) -> None:
    torch.ones(size, dtype=torch.uint8, device=device)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux restarts its high-water mark")
def test_the_peak_counts_what_was_freed_again_and_nothing_from_before() -> None:
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

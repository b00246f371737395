"""Peak memory, against allocations of known size."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch

from layerskip.device.memory import Made, PeakMemory, held_bytes, table_bytes

MEBIBYTE = 2**20


_GROWS = """
import os

import torch
from layerskip.memory import PeakMemory

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

torch.ones(300 * 2**20, dtype=torch.uint8)
memory, before = PeakMemory(torch.device("cpu")), resident()
print(memory.read() - before)
torch.ones(200 * 2**20, dtype=torch.uint8)
print(memory.read() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux restarts its high-water mark")
def test_the_peak_counts_what_was_freed_again_and_nothing_from_before() -> None:
    # In a process of its own: in this one, what other tests have left may be freed at any moment.
    printed = subprocess.run([sys.executable, "-c", _GROWS], check=True, capture_output=True, text=True).stdout
    at_first, at_last = (int(line) / MEBIBYTE for line in printed.split())
    assert at_first < 100 and 190 < at_last < 260


def test_a_processes_peak_is_at_least_what_it_holds_now() -> None:
    memory = PeakMemory(torch.device("cpu"))
    kept = torch.ones(50 * MEBIBYTE, dtype=torch.uint8)
    assert memory.read() >= kept.numel()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_device_memory_counts() -> None:
    kept = torch.ones(10 * MEBIBYTE, dtype=torch.uint8, device="cuda")
    memory = PeakMemory(torch.device("cuda"))
    before = torch.cuda.memory_allocated()
    torch.ones(64 * MEBIBYTE, dtype=torch.uint8, device="cuda")
    assert memory.read() == before + 64 * MEBIBYTE
    assert before >= kept.numel()
    assert memory.grown() == 64 * MEBIBYTE


def test_on_a_cpu_nobody_can_tell_what_decoding_took() -> None:
    assert PeakMemory(torch.device("cpu")).grown() is None


def test_tables_are_counted_as_python_allocates_them() -> None:
    """Lists of numbers in dictionaries, as drafters learn them."""
    linear, shared = torch.nn.Linear(4, 4), {number: str(number) for number in range(1000, 3000)}
    gc.collect()
    tracemalloc.start()
    try:
        table = {(number, number + 1): [number * 3, number * 5] for number in range(1000, 3000)}
        made = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    thing = [table, table, linear, shared]
    assert abs(table_bytes(thing, beside=[shared]) - made) < 0.1 * made
    assert table_bytes(thing) > table_bytes(thing, beside=[shared]) + sys.getsizeof(shared)


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


def test_what_is_made_in_a_block_counts_while_it_is_there_gradients_included() -> None:
    weight = torch.ones(1000, requires_grad=True)
    with Made([weight]) as made:
        gone = torch.ones(3000)
        del gone
        kept = torch.ones(700)
        loss = (weight[:500].view(5, 100) * 2.0).exp().sum()
        assert made.most == 4 * 3000
        torch.autograd.grad(loss, [weight])
    with Made([weight, kept]) as made:
        loss = (weight[:500].view(5, 100) * kept[:1]).exp().sum()  # keeps what exp gave
        assert made.most == 4 * 2 * 500
        torch.autograd.grad(loss, [weight])
        assert 4 * 1500 <= made.most < 4 * 1510  # behind it the gradient of a part becomes that of all

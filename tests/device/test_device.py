"""Memory compared with allocations of known size, and work without enough of it; reads of several tensors in one copy."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from layerskip.device import memory
from layerskip.device.memory import PeakMemory, within_memory
from layerskip.device.transfer import _read_packed, begin_reading, copy_to_device, read_to_host
from layerskip.device.trial import first_line
from tests.accelerator import DEVICE
from tests.searches.programs import fork

MEBIBYTE = 2**20


_GROWS = """
import os

import torch
from layerskip.device.memory import PeakMemory

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

torch.ones(300 * 2**20, dtype=torch.uint8)
memory, before = PeakMemory(torch.device("cpu")), resident()
print(memory.read() - before)
torch.ones(200 * 2**20, dtype=torch.uint8)
print(memory.read() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux can reset the high-water mark")
def test_the_peak_includes_freed_memory_and_nothing_from_before(tmp_path: Path) -> None:
    # In its own process, because in this one memory of other tests can be freed at any moment.
    (tmp_path / "grows.py").write_text(_GROWS, encoding="utf-8")
    done = fork("grows.py", cwd=tmp_path)
    at_first, at_last = (int(line) / MEBIBYTE for line in done.stdout.split())
    assert at_first < 100 and 190 < at_last < 260


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_device_memory_is_measured() -> None:
    kept = torch.ones(10 * MEBIBYTE, dtype=torch.uint8, device="cuda")
    memory = PeakMemory(torch.device("cuda"))
    before = torch.cuda.memory_allocated()
    torch.ones(64 * MEBIBYTE, dtype=torch.uint8, device="cuda")
    assert memory.read() == before + 64 * MEBIBYTE
    assert before >= kept.numel()


@pytest.mark.parametrize(
    "error", [MemoryError, torch.OutOfMemoryError, partial(RuntimeError, "cannot allocate memory")], ids=str
)
def test_memory_is_released_once_nothing_refers_to_what_did_not_fit(
    error: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    released: list[bool] = []

    def work() -> int:
        tensor = torch.zeros(3)
        held.append(weakref.ref(tensor))
        raise error()

    monkeypatch.setattr("layerskip.device.memory.release_memory", lambda: released.append(held[0]() is None))
    assert within_memory(work) is None
    assert released == [True]


def test_other_errors_and_results_are_passed_on() -> None:
    assert within_memory(lambda: 5) == 5
    with pytest.raises(RuntimeError, match="tensor"):
        within_memory(lambda: torch.ones(2) @ torch.ones(3))


@pytest.mark.parametrize(
    ("line", "root", "file"),
    [("0::/jobs/mine", "root", "memory.max"), ("4:memory:/jobs/mine", "root/memory", "memory.limit_in_bytes")],
)
def test_the_lowest_limit_of_the_control_groups_counts(
    line: str, root: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / root / "jobs" / "mine"
    own.mkdir(parents=True)
    (tmp_path / "cgroup").write_text(f"7:blkio:/jobs\n{line}\n")
    (own / file).write_text("max\n")
    (own.parent / file).write_text("4096\n")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_LIMITS", tmp_path / "root")
    assert memory.total_bytes() == 4096


def test_tensors_that_are_read_together_keep_their_values_and_shapes() -> None:
    tensors = (
        torch.tensor([1, -(2**62), 2**53 + 1], device=DEVICE),
        torch.tensor([[0.1, -1e30], [float("inf"), -0.0]], device=DEVICE).T,
        torch.empty(0, dtype=torch.int64, device=DEVICE),
        torch.tensor([0.1], dtype=torch.float64, device=DEVICE),
        torch.tensor(0.1, dtype=torch.bfloat16, device=DEVICE),
    )
    expected = [[1, -(2**62), 2**53 + 1], tensors[1].tolist(), [], [0.1], tensors[4].item()]
    assert _read_packed(tensors) == read_to_host(*tensors) == expected
    assert [begin_reading(part)() for part in tensors] == expected
    for values in ([[1, 2], [3, 4]], torch.tensor([True, False])):
        assert copy_to_device(values, torch.device(DEVICE)).tolist() == torch.as_tensor(values).tolist()


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("no\nsuch thing", "no"),
        ("raised:\nLoweringException: no\n\nSet a variable", "raised: LoweringException: no"),
        ("it ends:", "it ends:"),
        ("\n", "ValueError"),
    ],
)
def test_an_error_is_one_line(message: str, line: str) -> None:
    assert first_line(ValueError(message)) == line

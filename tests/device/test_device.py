"""Memory compared with allocations of known size, and work without enough of it; reads of several tensors in one copy."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from layerskip.device import memory
from layerskip.device.memory import PeakMemory, within_memory
from layerskip.device.transfer import DeviceWait, NoWaits, _read_packed, begin_reading, copy_to_device, read_to_host
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


_WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "a value": lambda t: t[0].item(),
    "a comparison": lambda t: torch.equal(t, t + 1),
    "places": lambda t: t.nonzero(),
    "a mask": lambda t: t[t > 0],
    "values under a mask": lambda t: t.index_put_((t > 0,), t[:2] + 1),
    "distinct values": lambda t: t.unique(),
    "unknown repeats": lambda t: t.repeat_interleave(t.clamp_min(1)),
    "places of what holds": lambda t: torch.where(t > 0),
    "a condition": lambda t: bool(t[0] > 0),
    "values of Python": lambda t: torch.tensor([1, 2]),
}
_PASSES: dict[str, Callable[[torch.Tensor], object]] = {
    "arithmetic": lambda t: (t * 2 + 1).sum(),
    "places that are known": lambda t: t[torch.arange(2)],
    "one value under a mask": lambda t: t.index_put_((t > 0,), torch.zeros((), dtype=t.dtype)),
    "known repeats": lambda t: t.repeat_interleave(t.clamp_min(1), output_size=4),
    "another data type": lambda t: t.to(torch.float32),
}


@pytest.mark.parametrize("name", [*_WAITS, *_PASSES])
@pytest.mark.parametrize("inference", [True, False])
def test_an_operation_that_waits_is_refused(name: str, inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all tensors count as those of a GPU."""
    monkeypatch.setattr("layerskip.device.transfer._is_remote", lambda tensor: True)
    values = torch.tensor([1, 2, -3], device=DEVICE)[:3]
    expected = pytest.raises(DeviceWait) if name in _WAITS else nullcontext()
    with torch.inference_mode(inference), expected, NoWaits(), torch.device(DEVICE):
        (_WAITS | _PASSES)[name](values)


def test_a_copy_is_refused_unless_nothing_waits_for_it() -> None:
    host, there = torch.zeros(2), torch.zeros(2, device="meta")
    host.tolist()
    with NoWaits():
        host.tolist()
        host.to("meta", non_blocking=True)
        there.copy_(host, non_blocking=True)
        for copy in (lambda: host.to("meta"), lambda: there.copy_(host)):
            with pytest.raises(DeviceWait):
                copy()


def test_one_thread_forbids_waiting_for_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two threads overlap, and neither changes what holds in the other or after both."""
    monkeypatch.setattr("layerskip.device.transfer._is_remote", lambda tensor: True)
    value, order = torch.zeros(1), [threading.Event() for _ in range(3)]

    def may_wait() -> bool:
        try:
            return value.item() == 0
        except DeviceWait:
            return False

    def first() -> list[bool]:
        with NoWaits():
            order[0].set()
            order[1].wait(60)
            found = [may_wait()]
        order[2].set()
        return [*found, may_wait()]

    def second() -> list[bool]:
        order[0].wait(60)
        found = [may_wait()]
        with NoWaits():
            order[1].set()
            order[2].wait(60)
            found.append(may_wait())
        return [*found, may_wait()]

    with ThreadPoolExecutor(2) as pool:
        found = [job.result() for job in (pool.submit(first), pool.submit(second))]
    assert found == [[False, True], [True, False, True]] and may_wait()

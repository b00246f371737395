"""The machine's line, busy cores and the choice of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from layerskip import Target
from layerskip.models.loading import choose_dtype
from searches.study import machine

pytestmark = pytest.mark.system


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Four threads, which no environment variable sets."""
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(before)


def test_the_data_type_follows_the_instruction_set_that_torch_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert choose_dtype("auto", torch.device("cpu"))[0] == torch.float32


def test_other_programs_are_noticed_while_they_run_and_by_the_load_average_in_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(2 * len(machine.usable_cores()))]
    try:
        line = machine.busy_line()
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert line is not None
    assert line.startswith("busy: ")
    monkeypatch.setattr(psutil, "cpu_percent", lambda *_, **__: [0.0] * (os.cpu_count() or 1))
    for load, noticed in ((0.5, False), (1.0 + (os.cpu_count() or 1), True)):
        monkeypatch.setattr(psutil, "getloadavg", lambda load=load: (load, load, load))
        assert (machine.busy_line() is not None) == noticed


@pytest.mark.parametrize(
    ("seconds", "chosen"), [({4: 1.0, 3: 0.98, 2: 1.5}, 4), ({4: 3.0, 3: 1.1, 2: 1.5}, 3), ({4: 3.0, 3: 2.0, 2: 1.0}, 2)]
)
def test_fewer_threads_are_chosen_where_they_are_clearly_faster(
    seconds: dict[int, float], chosen: int, tiny_target: Target, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tiny_target.device.type != "cpu":
        pytest.skip("threads of the processor")
    asked: list[Any] = []
    monkeypatch.setattr(machine, "_time_threads", lambda _, counts: asked.append(list(counts)) or seconds)
    line = machine.set_threads(tiny_target, None)
    assert (asked, torch.get_num_threads()) == ([[4, 3, 2]], chosen)
    assert (line is None) == (chosen == threads)
    monkeypatch.undo()
    timed = machine._time_threads(tiny_target, [2, 1])
    assert timed.keys() == {1, 2}
    assert all(each > 0 for each in timed.values())


def test_a_number_of_threads_that_is_set_is_kept(tiny_target: Target, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_time_threads", lambda *_: pytest.fail("measured"))
    assert machine.set_threads(tiny_target, 3) is None
    assert torch.get_num_threads() == 3
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "2")
    assert machine.set_threads(tiny_target, None) is None
    assert torch.get_num_threads() == 3

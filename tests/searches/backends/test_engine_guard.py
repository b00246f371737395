"""The guard of an engine within this process: its exit codes, and the end of everything below it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from searches.backends import engine_guard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_SET_SUBREAPER, _GET_SUBREAPER = 36, 37  # of linux/prctl.h
_ORPHAN = "setsid sleep 60 & echo $! > orphan"  # in a session of its own, and its parent ends


def _is_running(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the guard from processes that other tests have started."""
    everything, others = engine_guard.descendants, set(engine_guard.descendants())
    monkeypatch.setattr(engine_guard, "descendants", lambda: [each for each in everything() if each not in others])


@pytest.fixture
def held_input(own: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The end of a pipe that the guard reads as its input; signals, adoption and the folder are restored at the end."""
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    before, (reading, writing) = os.dup(0), os.pipe()
    os.dup2(reading, 0)
    yield writing
    os.dup2(before, 0)
    for descriptor in (before, reading, writing):
        os.close(descriptor)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    ctypes.CDLL(None).prctl(_SET_SUBREAPER, 0, 0, 0, 0)


def _main(script: str, grace_seconds: float = 5.0) -> int:
    return engine_guard.main([str(grace_seconds), "/bin/sh", "-c", script])


def test_descendants_are_the_processes_below_this_one() -> None:
    with subprocess.Popen(["/bin/sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        found = engine_guard.descendants()
        assert {child.pid, grandchild} <= set(found)
        assert os.getpid() not in found and os.getppid() not in found
        os.kill(grandchild, signal.SIGKILL)
    assert not {child.pid, grandchild} & set(engine_guard.descendants())


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -KILL $$", 128 + signal.SIGKILL), ("true", 0)])
def test_the_code_of_an_engine_that_ends_is_passed_on(held_input: int, script: str, code: int) -> None:
    assert _main(script) == code


def test_what_an_engine_left_behind_ends_with_it(held_input: int) -> None:
    adopted = ctypes.c_int()
    assert _main(_ORPHAN) == 0
    assert not _is_running(int(Path("orphan").read_text()))
    ctypes.CDLL(None).prctl(_GET_SUBREAPER, ctypes.byref(adopted), 0, 0, 0)
    assert adopted.value == 1


def test_an_engine_ends_once_the_input_of_its_guard_does(held_input: int) -> None:
    with open(os.devnull) as ended:
        os.dup2(ended.fileno(), 0)
    assert _main("exec sleep 60") == 0
    assert engine_guard.descendants() == []


def test_a_signal_to_the_guard_ends_an_engine_and_is_its_code(held_input: int) -> None:
    os.write(held_input, b"ignored")
    assert _main("sleep 60 & kill -TERM $PPID; exec sleep 60") == 128 + signal.SIGTERM
    assert engine_guard.descendants() == []


def test_an_engine_that_does_not_end_when_it_is_told_is_killed(held_input: int) -> None:
    script = "trap '' TERM; kill -HUP $PPID; while :; do sleep 60; done"
    assert _main(script, grace_seconds=0.1) == 128 + signal.SIGHUP
    assert engine_guard.descendants() == []

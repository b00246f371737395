"""The guard of an engine: its exit codes, and the end of everything below it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from searches.backends import engine_guard
from tests.searches.backends.processes import is_running

pytestmark = [pytest.mark.system, pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")]
_ORPHAN = "setsid sleep 60 & echo $! > orphan"  # in a session of its own, and its parent ends
_LEFT = 99  # exit code of a guard that left a process behind

Guard = Callable[..., int]


@pytest.fixture
def guard(tmp_path: Path) -> Guard:
    """Runs a guard of a shell script in a process of its own, and returns its exit code."""

    def run(script: str, grace_seconds: float = 5.0, written: bytes = b"", is_ended: bool = False) -> int:
        reading, writing = os.pipe()

        def body() -> None:
            os.chdir(tmp_path)
            os.dup2(reading, 0)
            os.close(writing)
            code = engine_guard.main([str(grace_seconds), "/bin/sh", "-c", script])
            sys.exit(_LEFT if engine_guard.descendants() else code)

        process = multiprocessing.get_context("fork").Process(target=body)
        process.start()
        os.write(writing, written)
        if is_ended:
            os.close(writing)
        process.join()
        for descriptor in (reading,) if is_ended else (reading, writing):
            os.close(descriptor)
        assert process.exitcode is not None
        return process.exitcode

    return run


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -KILL $$", 128 + signal.SIGKILL), ("true", 0)])
def test_the_code_of_an_engine_that_ends_is_passed_on(guard: Guard, script: str, code: int) -> None:
    assert guard(script) == code


def test_what_an_engine_left_behind_ends_with_it(guard: Guard, tmp_path: Path) -> None:
    assert guard(_ORPHAN) == 0
    assert not is_running(int((tmp_path / "orphan").read_text()))


def test_an_engine_ends_once_the_input_of_its_guard_does(guard: Guard) -> None:
    assert guard("exec sleep 60", is_ended=True) == 0


def test_a_signal_to_the_guard_ends_an_engine_and_is_its_code(guard: Guard) -> None:
    assert guard("sleep 60 & kill -TERM $PPID; exec sleep 60", written=b"ignored") == 128 + signal.SIGTERM


def test_an_engine_that_does_not_end_when_it_is_asked_to_is_killed(guard: Guard) -> None:
    script = "trap '' TERM; kill -HUP $PPID; while :; do sleep 60; done"
    assert guard(script, grace_seconds=0.1) == 128 + signal.SIGHUP

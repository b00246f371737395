"""The guard of an engine: its exit codes, and the end of everything below it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from searches.backends import engine_guard
from tests.searches.backends.processes import is_running

pytestmark = [pytest.mark.system, pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")]
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


@pytest.mark.parametrize(
    ("script", "code", "options"),
    [
        ("true", 0, {}),
        ("exit 3", 3, {}),
        ("kill -KILL $$", 128 + signal.SIGKILL, {}),
        ("exec sleep 60", 0, {"is_ended": True}),  # once its input ends
        ("sleep 60 & kill -TERM $PPID; exec sleep 60", 128 + signal.SIGTERM, {"written": b"ignored"}),
        ("trap '' TERM; kill -HUP $PPID; while :; do sleep 60; done", 128 + signal.SIGHUP, {"grace_seconds": 0.1}),
    ],
)
def test_a_guard_passes_on_how_its_engine_ended_or_why_it_ended_it(
    guard: Guard, script: str, code: int, options: dict[str, Any]
) -> None:
    assert guard(script, **options) == code


def test_what_an_engine_left_behind_ends_with_it(guard: Guard, tmp_path: Path) -> None:
    assert guard("setsid sleep 60 & echo $! > orphan") == 0  # in a session of its own, and its parent ends
    assert not is_running(int((tmp_path / "orphan").read_text()))

"""Engines as processes, and their guards: nothing that they start outlives them, whatever ends first."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest

from searches.backends.backend import BackendError
from searches.backends.engine_process import EngineProcess
from tests.searches.backends.processes import running, start, wait_for

_PROCESSES = 2  # of a stand-in: itself and one in a session of its own


def test_a_stopped_engine_ends_with_what_it_started(tmp_path: Path) -> None:
    process, client = start("--folder", str(tmp_path))
    seconds = process.wait_until(client.ready, 30)
    assert seconds > 0 and process.running
    assert len(running(tmp_path)) == _PROCESSES
    process.stop()
    assert running(tmp_path) == [] and not process.running
    process.stop()  # once more changes nothing


def test_an_engine_does_not_outlive_a_program_that_is_killed(tmp_path: Path) -> None:
    program = multiprocessing.get_context("fork").Process(target=lambda: (start("--folder", str(tmp_path)), time.sleep(600)))
    program.start()
    assert len(wait_for(tmp_path, _PROCESSES)) == _PROCESSES
    program.kill()
    program.join()
    assert wait_for(tmp_path, 0) == []


@pytest.mark.parametrize(
    ("fault", "reason", "logged"),
    [
        ("crash_at_start", "ended with exit code 1, while it started", "a planned crash at the start"),
        ("hang_at_start", "not ready after 0.3 seconds", ""),
    ],
)
def test_an_engine_that_does_not_start_is_an_error_with_its_log(
    tmp_path: Path, fault: str, reason: str, logged: str
) -> None:
    process, client = start("--folder", str(tmp_path), "--fault", fault)
    with pytest.raises(BackendError) as error:
        process.wait_until(client.ready, 0.3 if fault == "hang_at_start" else 30)
    assert error.value.reason == f"stand-in: {reason}"
    assert logged in error.value.log_tail
    assert wait_for(tmp_path, 0) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the score is Linux's")
def test_where_memory_runs_out_the_kernel_ends_an_engine_before_its_program() -> None:
    command = [sys.executable, "-uc", "print(open('/proc/self/oom_score_adj').read())"]
    process = EngineProcess(command, os.environ, "stand-in", asked=True)
    assert process.receive(30).strip() == "1000"
    process.stop()
    assert int(Path("/proc/self/oom_score_adj").read_text()) < 1000


def test_an_engine_answers_lines_until_it_ends_or_gives_none_in_time(tmp_path: Path) -> None:
    lines = "import sys, time; print(input()); print(input()); time.sleep(600)"
    process = EngineProcess([sys.executable, "-uc", lines], os.environ, "stand-in", asked=True)
    for line in ("one", "two"):
        process.send(line)
        assert process.receive(30) == f"{line}\n"
    with pytest.raises(BackendError, match="^backend: stand-in: no answer within 0.1 seconds$"):
        process.receive(0.1)
    assert not process.running
    process = EngineProcess([sys.executable, "-c", "input(); raise ValueError('bad')"], os.environ, "stand-in", asked=True)
    process.send("one")
    with pytest.raises(BackendError, match="stand-in: ended with exit code 1, before it answered: ValueError: bad$"):
        process.receive(30)


def test_a_command_is_waited_for_and_its_last_words_are_the_reason_if_it_fails() -> None:
    EngineProcess([sys.executable, "-c", "print('done')"], os.environ, "converter").wait_for_end(30)
    for script, seconds, reason in (
        ("print('noise'); raise ValueError('bad')", 30, "ValueError: bad"),
        ("import os; os.kill(os.getpid(), 9)", 30, "ended by SIGKILL, possibly for lack of memory"),
        ("import time; time.sleep(60)", 0.1, "not done after 0.1 seconds"),
    ):
        process = EngineProcess([sys.executable, "-c", script], os.environ, "converter")
        with pytest.raises(BackendError) as error:
            process.wait_for_end(seconds)
        assert error.value.reason == f"converter: {reason}" and not process.running


def test_an_interrupt_ends_an_engine_that_starts(tmp_path: Path) -> None:
    process, _ = start("--folder", str(tmp_path), "--fault", "hang_at_start")

    def interrupted() -> bool:
        if len(running(tmp_path)) == _PROCESSES:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        process.wait_until(interrupted, 30)
    assert running(tmp_path) == []


_ENGINE_CORE = "(EngineCore pid=7) ERROR 11-28 05:00:00 [core.py:9] "


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("WARNING: wait if you run out of memory\nKeyError: 'x'", "ended with exit code 1, at once: KeyError: 'x'"),
        (
            "ValueError: too long\nException ignored in: <function Engine.__del__ at 0x7f>\nAttributeError: no pipe",
            "ended with exit code 1, at once: ValueError: too long",
        ),
        (
            f"{_ENGINE_CORE}ValueError: No available memory for the cache blocks.\nRuntimeError: See root cause above.",
            "ended with exit code 1, at once: ValueError: No available memory for the cache blocks.",
        ),
        ("cudaMalloc failed: out of memory", "ended with exit code 1, at once"),
        ("", "ended by SIGKILL, possibly for lack of memory, at once"),
    ],
)
def test_a_reason_is_what_ended_the_engine(log: str, reason: str) -> None:
    script = f"import os, sys; sys.exit({log!r}) if {log!r} else os.kill(os.getpid(), 9)"
    process = EngineProcess([sys.executable, "-c", script], os.environ, "stand-in")
    process._guard.wait()
    error = process.error("at once")
    process.stop()
    assert error.reason == f"stand-in: {reason}"
    assert error.log_tail == log

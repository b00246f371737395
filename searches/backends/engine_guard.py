"""A small process between a program and an engine: it ends the engine with everything that the engine started.

It is run as a script, with psutil and the standard library alone, and never imported by a program. It starts the command of
its arguments, which gets its input and output, and ends it when the input is closed, when its parent is gone or when it is
terminated. The kernel closes the input of a guard whose program was killed, so that no engine outlives its search.

Exit code: the engine's own; 128 plus the number of a signal that ended the engine or this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

_SET_PARENT_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # of linux/prctl.h
_POLL_MILLISECONDS = 200
_KILL_SECONDS = 5.0


def _prctl(option: int, value: int) -> None:
    """Set a property of this process; nothing happens where the system is not Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _begin_engine() -> None:
    """Let the kernel end the engine with its guard, and before any other process where memory runs out."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write("1000")


def descendants() -> list[psutil.Process]:
    """Return all processes below this one."""
    return list(psutil.Process().children(recursive=True))


def end_all(grace_seconds: float) -> None:
    """Ask every process below this one to end, and kill those that have not after some seconds."""
    _send(signal.SIGTERM)
    for number, seconds in ((None, grace_seconds), (signal.SIGKILL, _KILL_SECONDS)):
        limit = time.monotonic() + seconds
        while (left := descendants()) and time.monotonic() < limit:
            if number is not None:
                _send(number)  # again and again, as a process may start another one before it ends
            psutil.wait_procs(left, 0.02)


def _send(number: signal.Signals) -> None:
    for process in descendants():
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def main(arguments: list[str]) -> int:
    """Run a command until it ends or has to be ended; return the exit code.

    Args:
        arguments: the seconds that the engine gets to end by itself, and the command.
    """
    grace_seconds, command, parent = float(arguments[0]), arguments[1:], os.getppid()
    _prctl(_SET_SUBREAPER, 1)  # processes that leave the engine's group come back to this one when their parent ends
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda received, _frame: signals.append(received))
    engine = subprocess.Popen(command, preexec_fn=_begin_engine)
    closed = select.poll()
    closed.register(0, 0)  # what is written to the input is for the engine; its end is always reported
    while engine.poll() is None and not signals and os.getppid() == parent and not closed.poll(_POLL_MILLISECONDS):
        pass
    code = engine.poll()
    end_all(grace_seconds if code is None else 0.0)
    if code is None:
        return 128 + signals[0] if signals else 0
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A small process between a program and an engine: it ends the engine with everything that the engine started.

It is run as a script, with the standard library alone, and never imported by a program. It starts the command of its
arguments and ends it when its standard input is closed, when its parent is gone or when it is terminated. The kernel
closes the input of a guard whose program was killed, so that no engine outlives its search.

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
from types import FrameType

_SET_PARENT_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # of linux/prctl.h
_POLL_SECONDS = 0.2
_KILL_SECONDS = 5.0


def _prctl(option: int, value: int) -> None:
    """Set a property of this process; nothing happens where the system is not Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants() -> list[int]:
    """Return the ids of all processes below this one, from ``/proc``; an empty list where there is none."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
                # The name in parentheses may hold spaces and parentheses of its own.
                parent = int(file.read().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _reap() -> None:
    """Collect ended processes that this one adopted; as zombies they would count as running."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_all(grace_seconds: float) -> None:
    """Ask every process below this one to end, and kill those that have not after some seconds."""
    for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, _KILL_SECONDS)):
        _send(number)
        limit = time.monotonic() + seconds
        while descendants() and time.monotonic() < limit:
            _reap()
            time.sleep(0.02)
            if number == signal.SIGKILL:
                _send(number)  # again, as a process may have started another one before it ended


def _send(number: int) -> None:
    for process in descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def main(arguments: list[str]) -> int:
    """Run a command until it ends or has to be ended; return the exit code.

    Args:
        arguments: the seconds that the engine gets to end by itself, and the command.
    """
    grace_seconds, command, parent = float(arguments[0]), arguments[1:], os.getppid()
    _prctl(_SET_SUBREAPER, 1)  # processes that leave the engine's group come back to this one when their parent ends
    signals: list[int] = []

    def tell(number: int, _frame: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, tell)
    engine = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, preexec_fn=lambda: _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    )
    while engine.poll() is None and not signals and os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], _POLL_SECONDS)
        if readable and not os.read(0, 1):
            break
    code = engine.poll()
    end_all(grace_seconds if code is None else 0.0)
    if code is None:
        return 128 + signals[0] if signals else 0
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

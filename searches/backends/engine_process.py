"""An engine that runs as a process of its own, and is ended with everything that it started, whatever happens."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from searches.backends.backend import BackendError
from searches.backends.engine_marks import end_marked, end_orphans, open_log

GRACE_SECONDS = 5.0
"""An engine that is told to end has so long to free what it holds before it is killed."""
_GUARD = Path(__file__).with_name("engine_guard.py")
_TAIL_BYTES = 65536
_SHOWN = 200  # characters of an error
_ERROR = re.compile(
    r"^(?:\(.*?\) )?(?:[A-Z]+ \S+ \S+ \[.*?\] )?(?:\w+\.)*(\w*(?:Error|Exception|Interrupt): .+)", re.MULTILINE
)
"""A line that an exception ends with, behind vLLM's names of process and place. Advice may quote an error within a line."""
_POLL_SECONDS = 0.1
_OUT_OF_MEMORY = ("out of memory", "memoryerror", "cannot allocate memory", "can't allocate memory", "bad_alloc")
_NO_CACHE = ("no available memory for the cache blocks", "larger than the available kv cache memory")


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EngineProcess:
    """A running engine, with the last lines of its log.

    A guard (:mod:`searches.backends.engine_guard`) starts it, and ends it at :meth:`stop` or when this process is gone.
    If the guard is killed, the processes are found by their log (:mod:`searches.backends.engine_marks`), at :meth:`stop` or
    when another engine is started.

    Args:
        command: of the engine.
        environment: of the engine.
        name: of the engine, for reasons.
        grace_seconds: that it gets to end by itself.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], name: str, grace_seconds: float = GRACE_SECONDS
    ) -> None:
        self.name, self._grace = name, grace_seconds
        end_orphans()  # of a program whose guard was killed with it
        self._log = open_log()
        self.started = time.monotonic()
        # Isolated, and without site-packages, as it needs nothing but the standard library.
        guard = [sys.executable, "-I", "-S", str(_GUARD), str(grace_seconds)]
        self._guard = subprocess.Popen(
            [*guard, *command],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,  # a group of its own, which Ctrl-C in a terminal does not reach
        )

    @property
    def running(self) -> bool:
        """True until the engine has ended."""
        return self._guard.poll() is None

    def log_tail(self) -> str:
        """Return the end of what the engine printed."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")

    def error(self, reason: str) -> BackendError:
        """Return an error with the log's tail. If the engine has ended, the reason is how."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(0.5)  # an engine that drops a connection is about to end
        code, tail = self._guard.poll(), self.log_tail()
        if code is not None:
            reason = f"{self._end(code, tail)}, {reason}{_cause(tail)}"
        elif _has(tail, _OUT_OF_MEMORY):
            reason = f"out of memory, {reason}"
        return BackendError(f"{self.name}: {reason}", tail)

    def wait_until(self, ready: Callable[[], bool], limit_seconds: float) -> float:
        """Wait until the engine is ready; return the seconds since its start.

        Args:
            ready: whether it is.
            limit_seconds: after its start; an engine that is not ready by then is stopped.

        Raises:
            BackendError: it ended, or is not ready in time.
        """
        while not ready():
            if not self.running:
                error = self.error("while it started")
                self.stop()
                raise error
            if time.monotonic() - self.started > limit_seconds:
                error = self.error(f"not ready after {limit_seconds:g} seconds")
                self.stop()
                raise error
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - self.started

    def stop(self) -> None:
        """End the engine and everything that it started. May be called twice."""
        if self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
        try:
            self._guard.wait(self._grace + 10)  # the guard kills what does not end
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._guard.pid, signal.SIGKILL)  # only what the guard could not end is still in its group
            self._guard.wait()
            if not self._log.closed:
                end_marked(self._log)
                self._log.close()

    @staticmethod
    def _end(code: int, tail: str) -> str:
        """Return how an engine ended, in a few words."""
        if _has(tail, _OUT_OF_MEMORY) or _has(tail, _NO_CACHE):
            return f"out of memory (exit code {code})"
        number = code - 128 if code > 128 else -code
        if number in (each.value for each in signal.Signals):
            name = signal.Signals(number).name
            hint = ", possibly for lack of memory" if number == signal.SIGKILL else ""
            return f"ended by {name}{hint}"
        return f"ended with exit code {code}"


def _cause(tail: str) -> str:
    """Return the last error in a log that does not point to another one, after a colon; empty if there is none."""
    found = [error for error in _ERROR.findall(tail) if "root cause" not in error]
    return f": {' '.join(found[-1].split())[:_SHOWN]}" if found else ""


def _has(tail: str, words: Sequence[str]) -> bool:
    lowered = tail.lower()
    return any(word in lowered for word in words)

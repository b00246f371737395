"""An engine that runs as a process of its own, and is ended with everything that it started, whatever happens.

A guard (:mod:`searches.backends.engine_guard`) stands between a program and its engine.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from searches.app.composition import CONF
from searches.backends.backend import BackendError

_INSTALLED = Path(CONF).parent / ".engines"
"""Where ``make engines`` installs each engine, in an environment of its own; ``LAYERSKIP_ENGINES`` names another folder."""
_GUARD = Path(__file__).with_name("engine_guard.py")
_TAIL_BYTES = 65536
_SHOWN = 200  # characters of an error
_ERROR = re.compile(
    r"^(?:\(.*?\) )?(?:[A-Z]+ \S+ \S+ \[.*?\] )?(?:\w+\.)*(\w*(?:Error|Exception|Interrupt): .*)", re.MULTILINE
)
"""A line that an exception ends with, behind vLLM's names of process and place. Advice may quote an error within a line."""
_POLL_SECONDS = 0.1


def interpreter(engine: str, python: str | None = None) -> str | None:
    """Return the interpreter in which an engine is installed, the given one if there is one; None if it is not installed."""
    own = Path(os.environ.get("LAYERSKIP_ENGINES", _INSTALLED)) / engine / "bin" / "python"
    if python is not None or own.exists():
        return python or str(own)
    return sys.executable if importlib.util.find_spec(engine) is not None else None


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EngineProcess:
    """A running engine, with the last lines of its log. Its guard ends it at :meth:`stop` or when this process is gone.

    It gets ``grace_seconds`` to free what it holds and end; then it is killed. With ``asked``, lines of its input and output
    are requests and answers, and only its errors are its log. Reasons of errors begin with its name.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], name: str, grace_seconds: float = 5.0, asked: bool = False
    ) -> None:
        self.name, self._grace, self.started = name, grace_seconds, time.monotonic()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the engine
        self._guard = subprocess.Popen(
            [sys.executable, "-P", str(_GUARD), str(grace_seconds), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if asked else self._log,
            stderr=self._log,
            env=dict(env),
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
            cause = _ERROR.search(tail)  # the first error, which those that follow come from
            reason = f"{_end(code)}, {reason}" + (f": {' '.join(cause[1].split())[:_SHOWN]}" if cause else "")
        return BackendError(f"{self.name}: {reason}", tail)

    def wait_until(self, ready: Callable[[], bool], limit_seconds: float) -> float:
        """Return the seconds until the engine is ready; stop one that ends or is late, and raise a :class:`BackendError`."""
        try:
            while self.running and not ready():
                if time.monotonic() - self.started > limit_seconds:
                    raise self.error(f"not ready after {limit_seconds:g} seconds")
                time.sleep(_POLL_SECONDS)
            if not self.running:
                raise self.error("while it started")
        except BaseException:  # an interrupt, too, as nothing else refers to the engine yet
            self.stop()
            raise
        return time.monotonic() - self.started

    def wait_for_end(self, limit_seconds: float) -> None:
        """Wait until a command succeeds; otherwise raise a :class:`BackendError` with its last error or line."""
        try:
            if code := self._guard.wait(limit_seconds):
                tail = self.log_tail()
                words = [error[1] for error in _ERROR.finditer(tail)] or tail.strip().splitlines() or [_end(code)]
                raise BackendError(f"{self.name}: {words[-1][:_SHOWN]}", tail)
        except subprocess.TimeoutExpired:
            raise self.error(f"not done after {limit_seconds:g} seconds") from None
        finally:
            self.stop()

    def send(self, line: str) -> None:
        """Write a line to the engine's input."""
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading the answer reports it
            self._guard.stdin.write(line.encode() + b"\n")
            self._guard.stdin.flush()

    def receive(self, limit_seconds: float) -> str:
        """Return the next line of the output; stop an engine that ends, or is late, and raise a :class:`BackendError`."""
        assert self._guard.stdout is not None
        begun, watch = time.monotonic(), threading.Timer(limit_seconds, self._guard.terminate)
        watch.daemon = True
        watch.start()
        try:
            line = self._guard.stdout.readline()
        finally:
            watch.cancel()
        if line:
            return line.decode(errors="replace")
        try:
            if time.monotonic() - begun >= limit_seconds:
                raise BackendError(f"{self.name}: no answer within {limit_seconds:g} seconds", self.log_tail())
            raise self.error("before it answered")
        finally:
            self.stop()

    def stop(self) -> None:
        """End the engine and everything that it started. May be called twice."""
        if self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(self._grace + 10)  # the guard kills what does not end
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._guard.pid, signal.SIGKILL)  # only what the guard could not end is still in its group
            self._guard.wait()
            if self._guard.stdout is not None:
                self._guard.stdout.close()
            self._log.close()


def _end(code: int) -> str:
    """Return how an engine ended, in a few words."""
    number = code - 128 if code > 128 else -code
    if number in (each.value for each in signal.Signals):
        hint = ", possibly for lack of memory" if number == signal.SIGKILL else ""
        return f"ended by {signal.Signals(number).name}{hint}"
    return f"ended with exit code {code}"

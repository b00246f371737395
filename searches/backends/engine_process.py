"""An engine that runs as a process of its own, and is ended with everything that it started, whatever happens.

The mark of an engine's processes is the name of their log, by which they are found whatever became of their parents. A
process inherits its standard output from the one that started it, even into a session of its own. It keeps it when it writes
a title over its environment, as vLLM does. Linux shows the name of a removed file, too. The name states the program that
started the engine, by number and start, and the namespace of the number, so that engines of other containers are left alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from searches.backends.backend import BackendError
from searches.workers.pool import start_of

_PREFIX = "layerskip-engine"
_ENDING_SECONDS = 5.0
_GRACE_SECONDS = 5.0  # in which an engine that has to end frees what it holds; then it is killed
_GUARD = Path(__file__).with_name("engine_guard.py")
_TAIL_BYTES = 65536
_SHOWN = 200  # characters of an error
_ERROR = re.compile(r"(?:\(.*?\) )?(?:[A-Z]+ \S+ \S+ \[.*?\] )?(?:\w+\.)*(\w*(?:Error|Exception|Interrupt): .*)")
"""A line that an exception ends with, behind vLLM's names of process and place. Advice may quote an error within a line."""
_IGNORED = "Exception ignored"  # before what goes wrong while Python deletes objects
_OUT_OF_MEMORY = re.compile(
    r"MemoryError|bad_alloc|(?:error|exception|failed|fork)\b.*(?:out of memory|can(?:not|'t) allocate memory"
    r"|no available memory for the cache blocks|larger than the available kv cache memory)",
    re.IGNORECASE,
)
"""What an engine without memory prints, in contrast to advice for the case."""
_POLL_SECONDS = 0.1


def _open_log() -> IO[bytes]:
    """Return an empty file for an engine's output. It is removed already, and vanishes with the processes that hold it."""
    program = os.getpid()
    mark = f"{_PREFIX}.{_namespace()}.{program}.{start_of(program)}."
    log = tempfile.NamedTemporaryFile(prefix=mark, delete=False)  # noqa: SIM115  # as long as the engine
    os.unlink(log.name)
    return log


def _end_marked(log: IO[bytes]) -> None:
    """Kill the processes that write to a log, until there are none."""
    name, limit = os.path.basename(log.name), time.monotonic() + _ENDING_SECONDS
    while (found := [process for process, mark in _marked() if mark == name]) and time.monotonic() < limit:
        _kill(found)
        time.sleep(0.02)


def _end_orphans() -> None:
    """Kill the engines of programs that have ended; their guards were killed, too, or would end them just now."""
    orphans = []
    for process, mark in _marked():
        fields = mark.split(".")  # other programs may write to files of such a name
        if len(fields) > 4 and fields[1] == _namespace() and fields[2].isdigit() and start_of(int(fields[2])) != fields[3]:
            orphans.append(process)
    _kill(orphans)


def _marked() -> Iterator[tuple[int, str]]:
    """Yield the processes whose output is an engine's log, with its name; none where there is no ``/proc``."""
    for folder in Path("/proc").glob("[0-9]*"):
        for stream in ("1", "2"):
            with contextlib.suppress(OSError):
                name = os.path.basename(os.readlink(folder / "fd" / stream)).removesuffix(" (deleted)")
                if name.startswith(_PREFIX) and start_of(int(folder.name)):
                    yield int(folder.name), name
                    break


def _kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def _namespace() -> str:
    """Return the identity of the namespace of process numbers; empty where there is none."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Hold a port of this machine: until the block ends, only a server that gets its number can listen on it.

    Seconds pass until an engine listens. Without this, an engine of another worker could get the port, and be measured.
    """
    with socket.socket() as holder:
        if sys.platform == "linux":  # other systems let no second socket have a port
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                holder.setsockopt(socket.SOL_SOCKET, option, 1)
        holder.bind(("127.0.0.1", 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":
            holder.close()
        yield port


class EngineProcess:
    """A running engine, with the last lines of its log.

    A guard (:mod:`searches.backends.engine_guard`) starts it, and ends it at :meth:`stop` or when this process is gone.
    If the guard is killed, the processes are found by their log, at :meth:`stop` or when another engine is started.
    Reasons begin with its name. ``grace_seconds`` are those that it gets to end by itself.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], name: str, grace_seconds: float = _GRACE_SECONDS
    ) -> None:
        self.name, self._grace = name, grace_seconds
        _end_orphans()
        self._log = _open_log()
        self.started = time.monotonic()
        self._guard = subprocess.Popen(
            [sys.executable, "-P", str(_GUARD), str(grace_seconds), *command],
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
            reason = f"{_end(code, tail)}, {reason}{_cause(tail)}"
        elif _OUT_OF_MEMORY.search(tail):
            reason = f"out of memory, {reason}"
        return BackendError(f"{self.name}: {reason}", tail)

    def wait_until(self, ready: Callable[[], bool], limit_seconds: float) -> float:
        """Wait until the engine is ready; return the seconds since its start.

        One that has ended, or is not ready so many seconds after its start, is stopped, and a :class:`BackendError` raised.
        """
        try:
            while not ready():
                if not self.running:
                    raise self.error("while it started")
                if time.monotonic() - self.started > limit_seconds:
                    raise self.error(f"not ready after {limit_seconds:g} seconds")
                time.sleep(_POLL_SECONDS)
        except BaseException:  # an interrupt, too, as nothing else refers to the engine yet
            self.stop()
            raise
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
                _end_marked(self._log)
                self._log.close()


def _end(code: int, tail: str) -> str:
    """Return how an engine ended, in a few words."""
    if _OUT_OF_MEMORY.search(tail):
        return f"out of memory (exit code {code})"
    number = code - 128 if code > 128 else -code
    if number in (each.value for each in signal.Signals):
        hint = ", possibly for lack of memory" if number == signal.SIGKILL else ""
        return f"ended by {signal.Signals(number).name}{hint}"
    return f"ended with exit code {code}"


def _cause(tail: str) -> str:
    """Return the last error in a log, after a colon; empty if there is none.

    Errors that point to another one do not count, nor do those that Python ignored.
    """
    ignored, found = False, ""
    for line in tail.splitlines():
        ignored = ignored or _IGNORED in line
        if (error := _ERROR.match(line)) is not None:
            found = found if ignored or "root cause" in error[1] else f": {' '.join(error[1].split())[:_SHOWN]}"
            ignored = False
    return found

"""The mark of an engine's processes: the name of their log, by which they are found whatever became of their parents.

A process inherits its standard output from the one that started it, even into a session of its own. It keeps it when it
writes a title over its environment, as vLLM does. Linux shows the name of a removed file, too. The name states the program
that started the engine, by number and start, and the namespace of the number, so that engines of other containers are left
alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from searches.app.process import start_of

_PREFIX = "layerskip-engine"
_ENDING_SECONDS = 5.0


def open_log() -> IO[bytes]:
    """Return an empty file for an engine's output. It is removed already, and vanishes with the processes that hold it."""
    program = os.getpid()
    mark = f"{_PREFIX}.{_namespace()}.{program}.{start_of(program)}."
    log = tempfile.NamedTemporaryFile(prefix=mark, delete=False)  # noqa: SIM115  # as long as the engine
    os.unlink(log.name)
    return log


def end_marked(log: IO[bytes]) -> None:
    """Kill the processes that write to a log, until there are none."""
    name, limit = os.path.basename(log.name), time.monotonic() + _ENDING_SECONDS
    while (found := [process for process, mark in _marked() if mark == name]) and time.monotonic() < limit:
        _kill(found)
        time.sleep(0.02)


def end_orphans() -> None:
    """Kill the engines of programs that have ended; their guards were killed, too, or would end them just now."""
    here, orphans = _namespace(), []
    for process, mark in _marked():
        fields = mark.split(".")
        if len(fields) > 3 and fields[1] == here and fields[2].isdigit() and start_of(int(fields[2])) != fields[3]:
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

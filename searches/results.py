"""Results in the outputs folder: their version, the header of records, logs that interrupted work resumes from, and locks.

A log grows line by line, and drops a partial last line. Programs that need the same file make it once: one holds its lock,
the others wait and then find it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import time
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import filelock

from layerskip import ConfigError, Target
from layerskip.files import beside, report_full_disk
from layerskip.models.environment import environment

RESULTS_VERSION = 7
"""Version of what decodes, measures and predicts. It is part of what names stored results, which are made again once the
author of a change after which they would be others has raised it."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
_POLL_SECONDS = 0.05
_without_locks: set[Path] = set()
"""Folders that a line was printed for."""


def record_header(schema: str, target: Target) -> dict[str, Any]:
    """Return the first fields of a record: its schema, date, target and environment."""
    return {
        "schema": schema,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "target": target.describe(),
        "environment": environment(target),
    }


class ResultLog(dict[str, Any]):
    """Values by name, in a file of JSON lines, which is created by the first :meth:`add`; without a path in memory only."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._path = path
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        """Read the lines of the file; a last line that a full disk or a kill left damaged is dropped."""
        lines = path.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError
                name, value = json.loads(line)
            except (ValueError, TypeError):
                if number < len(lines):
                    message = f"outputs: {path} is damaged in line {number}; delete it to repeat its work"
                    raise ConfigError(message) from None
                print(f"outputs: the last line of {path} is damaged and was dropped", flush=True)
                os.truncate(path, path.stat().st_size - len(line))
            else:
                self[str(name)] = value

    def add(self, name: str, value: Any) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            line = f"{json.dumps([name, value])}\n".encode()
            # Unbuffered, because another process may append a line of its own.
            with report_full_disk(self._path, self._path), self._path.open("ab", buffering=0) as file:
                if (written := file.write(line)) < len(line):
                    file.truncate(file.tell() - written)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self[name] = value


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Wait until no other process writes a file or folder, then hold its lock, which a killed process releases."""
    for attempt in itertools.count():
        with exclusive_if_free(path) as free:
            if free:
                yield
                return
        if not attempt:
            print(f"waiting for another program, which writes {path}", flush=True)
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def exclusive_if_free(path: Path) -> Iterator[bool]:
    """Hold the lock as :func:`exclusive` does, or yield False at once; where there are no locks, a second file is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = _acquired(beside(path, "lock"))
    except filelock.Timeout:
        yield False
        return
    with held:
        yield True


def _acquired(file: Path) -> contextlib.AbstractContextManager[object]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # of a fallback to the same file, which says nothing of what to do
            return filelock.FileLock(file).acquire(blocking=False)
    except (OSError, UserWarning, NotImplementedError) as error:
        if getattr(error, "errno", errno.ENOSYS) not in _NO_LOCKS:
            raise
    marker = file.with_name(f"{file.name}.held")
    if marker.parent not in _without_locks:
        _without_locks.add(marker.parent)
        print(
            f"the file system of {file.parent} has no locks; {marker.name} is one: delete it if its program was killed",
            flush=True,
        )
    return filelock.SoftFileLock(marker).acquire(blocking=False)

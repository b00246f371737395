"""A log of results from which interrupted work resumes; it grows line by line, and drops a partial last line."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from layerskip import ConfigError
from layerskip.files import report_full_disk

Line = TypeVar("Line")


class ResultLog:
    """Values by name, in a file of JSON lines.

    Args:
        path: the file, created with the first value; None keeps values in memory only.

    Raises:
        ConfigError: a line of the file is damaged.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._values: dict[str, Any] = {}
        if path is not None and path.exists():
            self._values = dict(read_lines(path, "outputs", _pair, "delete it to repeat its work"))

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, name: str, value: Any, persist: bool = True) -> None:
        """Add a value under a new name; with ``persist=False`` in memory only."""
        if self._path is not None and persist:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            line = f"{json.dumps([name, value])}\n".encode()
            # Unbuffered, since another process may append a line of its own.
            with report_full_disk(self._path, self._path), self._path.open("ab", buffering=0) as file:
                if file.write(line) < len(line):
                    drop_partial_line(self._path)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._values[name] = value


def _pair(line: bytes) -> tuple[str, Any]:
    name, value = json.loads(line)
    return str(name), value


def read_lines(path: Path, field: str, read: Callable[[bytes], Line], remedy: str) -> list[Line]:
    """Return the lines of a file, none if there is no file. A partial or damaged last line is cut off.

    Args:
        path: of the file.
        field: of the configuration, which begins messages.
        read: returns what a line holds; it raises an error if the line is damaged.
        remedy: what the user can do.

    Raises:
        ConfigError: a line before the last is damaged.
    """
    drop_partial_line(path)
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(read(line))
        except (ValueError, TypeError, LookupError):
            if number < len(lines):
                raise ConfigError(damage(path, field, number, remedy)) from None
            print(f"{field}: the last line of {path} is damaged and was dropped", flush=True)
            os.truncate(path, path.stat().st_size - len(line))
    return found


def damage(path: Path, field: str, line: int, remedy: str) -> str:
    """Return the message about a damaged line, by its number from 1."""
    return f"{field}: {path} is damaged in line {line}; {remedy}"


def drop_partial_line(path: Path) -> None:
    """Cut off a partial last line, as a full disk or a killed machine leaves, so that it does not spoil the next line."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() == b"\n":
            return
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

"""A log of results from which interrupted work resumes; it grows line by line, and drops a partial last line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerskip import ConfigError


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
            drop_partial_line(path)
            self._values = dict(_pair(path, *line) for line in enumerate(path.read_bytes().splitlines(), 1))

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
            # Unbuffered, since another process may append a line of its own.
            with self._path.open("ab", buffering=0) as file:
                file.write(f"{json.dumps([name, value])}\n".encode())
        self._values[name] = value


def _pair(path: Path, number: int, line: bytes) -> tuple[str, Any]:
    try:
        name, value = json.loads(line)
        return str(name), value
    except (ValueError, TypeError):
        raise ConfigError(f"outputs: {path} is damaged in line {number}; delete it to repeat its work") from None


def drop_partial_line(path: Path) -> None:
    """Cut off a partial last line, as a full disk or a killed machine leaves, so that it does not spoil the next line."""
    if path.exists() and not (data := path.read_bytes()).endswith(b"\n") and data:
        with path.open("rb+") as file:
            file.truncate(data.rfind(b"\n") + 1)

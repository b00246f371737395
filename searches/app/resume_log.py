"""What was found out before an interruption? Values in a file that grows line by line; half a line is dropped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerskip import ConfigError


class ResultLog:
    """Values by name, in a file of JSON lines.

    Args:
        path: the file; made with the first value. None keeps values for the time of this process.
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

    def add(self, name: str, value: Any, lasting: bool = True) -> None:
        """Keep a value under a new name; one that is not lasting for the time of this process alone."""
        if self._path is not None and lasting:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:  # at once: another process may write a line of its own
                file.write(f"{json.dumps([name, value])}\n".encode())
        self._values[name] = value


def _pair(path: Path, number: int, line: bytes) -> tuple[str, Any]:
    try:
        name, value = json.loads(line)
        return str(name), value
    except (ValueError, TypeError):
        raise ConfigError(f"outputs: {path} is damaged in line {number}; without the file, its work is done anew") from None


def drop_partial_line(path: Path) -> None:
    """Cut off half a line, which a full disk or a killed machine can leave, before it spoils the next one."""
    if path.exists() and not (data := path.read_bytes()).endswith(b"\n") and data:
        with path.open("rb+") as file:
            file.truncate(data.rfind(b"\n") + 1)

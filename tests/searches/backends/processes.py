"""Processes that stand-in engines wrote down."""

from __future__ import annotations

import sys
import time
from pathlib import Path

STANDIN = (sys.executable, str(Path(__file__).with_name("standin.py")))


def running(folder: Path) -> list[int]:
    """Return the recorded processes that have not ended."""
    found = []
    for file in folder.iterdir():
        try:
            state = Path(f"/proc/{file.name}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(int(file.name))
    return found


def wait_for(folder: Path, count: int, limit_seconds: float = 30.0) -> list[int]:
    """Wait until so many recorded processes run, and return them; fewer or more only after the limit."""
    end = time.monotonic() + limit_seconds
    while len(found := running(folder)) != count and time.monotonic() < end:
        time.sleep(0.02)
    return found

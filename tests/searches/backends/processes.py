"""Processes that stand-in engines wrote down."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from searches.workers.pool import start_of

STANDIN = (sys.executable, str(Path(__file__).with_name("standin.py")))


def running(folder: Path) -> list[int]:
    """Return the recorded processes that have not ended."""
    return [process for process in (int(file.name) for file in folder.iterdir()) if is_running(process)]


def is_running(process: int) -> bool:
    """Return whether a process has not ended; a zombie has."""
    return start_of(process) != ""


def wait_for(folder: Path, count: int, limit_seconds: float = 30.0) -> list[int]:
    """Wait until so many recorded processes run, and return them; fewer or more only after the limit."""
    end = time.monotonic() + limit_seconds
    while len(found := running(folder)) != count and time.monotonic() < end:
        time.sleep(0.02)
    return found

"""Stand-in engines, and the processes that they wrote down."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from searches.backends.client import Client
from searches.backends.engine_process import EngineProcess, free_port
from searches.workers.pool import start_of

STANDIN = (sys.executable, str(Path(__file__).with_name("standin.py")))


def start(*options: str, limit_seconds: float = 20.0) -> tuple[EngineProcess, Client]:
    """Start a stand-in, and return it with a client."""
    port = free_port()
    process = EngineProcess([*STANDIN, "--port", str(port), *options], os.environ, "stand-in", grace_seconds=2.0)
    return process, Client(f"http://127.0.0.1:{port}/v1", limit_seconds)


@contextlib.contextmanager
def served(*options: str, limit_seconds: float = 20.0) -> Iterator[Client]:
    """Serve a stand-in whose faults begin with the first request."""
    process, client = start("--after", "0", *options, limit_seconds=limit_seconds)
    try:
        process.wait_until(client.ready, 30)
        yield client
    finally:
        process.stop()


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

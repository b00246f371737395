"""A database for the processes of a test, in memory where possible: on a busy disk, each change takes long."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def database(tmp_path: Path) -> Iterator[str]:
    """The URL of a new SQLite database."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield f"sqlite:///{folder}/study.db"

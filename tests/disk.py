"""Filling of a disk for tests."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def fill(folder: Path, leave: int) -> None:
    """Fill the file system of a folder with a file ``ballast``, except for ``leave`` bytes."""
    stats = os.statvfs(folder)
    # Another writer may take the last bytes first, which also fills the disk.
    with contextlib.suppress(OSError), (folder / "ballast").open("wb") as ballast:
        ballast.write(b"0" * max(0, stats.f_bavail * stats.f_frsize - leave))

"""How is a disk made full?"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def fill(place: Path, leave: int) -> None:
    """Leave so many bytes of the file system that a folder lies in; the file that takes the others is its ``ballast``."""
    stats = os.statvfs(place)
    # Whoever else writes there may be quicker to the last byte; full is full.
    with contextlib.suppress(OSError), (place / "ballast").open("wb") as ballast:
        ballast.write(b"0" * max(0, stats.f_bavail * stats.f_frsize - leave))

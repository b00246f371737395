"""Programs that have another name today."""

from __future__ import annotations

import sys
from typing import NoReturn


def moved(program: str, module: str) -> NoReturn:
    """End a program of an earlier version with one line that names today's module."""
    print(f"error: python -m searches.{program} is now python -m {module}", file=sys.stderr)
    sys.exit(2)

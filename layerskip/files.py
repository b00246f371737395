"""How is a file written whole or not at all, and what is it called after?"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def digest(value: Any) -> str:
    """SHA-256 of a plain value, in hexadecimal: what is kept under it depends on nothing else."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write JSON beside the file and move it into place; a kill or a full disk leaves the file as it was.

    Raises:
        ValueError: the value holds NaN or an infinity, which JSON does not have.
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)

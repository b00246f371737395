"""The fields that every record begins with, and the program's own sources."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from layerskip import Export, Target
from layerskip.models.environment import environment

_PACKAGES = ("layerskip", "searches")
_ROOT = Path(__file__).parents[2]


def record_header(schema: str, target: Target) -> dict[str, Any]:
    """Return the first fields of a record: its schema, date, target and environment."""
    return {
        "schema": schema,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "target": Export.describe(target),
        "environment": environment(target),
    }


def program_sources() -> list[str]:
    """Return the program's source files. Their digest goes into records, because results depend on them as on settings."""
    return [path.read_text(encoding="utf-8") for name in _PACKAGES for path in sorted((_ROOT / name).rglob("*.py"))]

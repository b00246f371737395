"""What does every record begin with? Its schema, when it was made, of which target, on what machine, and by what program."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from layerskip import Export, Target
from layerskip.models.environment import environment

_PACKAGES = ("layerskip", "searches")
_ROOT = Path(__file__).parents[2]


def record_header(schema: str, target: Target) -> dict[str, Any]:
    """The first fields of a record."""
    return {
        "schema": schema,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "target": Export.describe(target),
        "environment": environment(target),
    }


def program_sources() -> list[str]:
    """This program's own text, which decides what is found as much as settings do."""
    return [path.read_text(encoding="utf-8") for name in _PACKAGES for path in sorted((_ROOT / name).rglob("*.py"))]

"""What does every record begin with? Its schema, when it was made, of which target, and on what machine."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from layerskip import Export, Target
from layerskip.environment import environment


def heading(schema: str, target: Target) -> dict[str, Any]:
    """The first fields of a record."""
    return {
        "schema": schema,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "target": Export.describe(target),
        "environment": environment(target.device),
    }

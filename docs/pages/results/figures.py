"""Figures and configurations of records as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def ranged(found: Mapping[str, float], value: str = "speedup", low: str = "low", high: str = "high") -> str:
    """A figure with its interval, from the fields of these names."""
    return f"{found[value]:.2f} ({found[low]:.2f} to {found[high]:.2f})"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def aims(missed: Sequence[str]) -> str:
    return f"**Missed:** {', '.join(missed)}." if missed else "All are met."


def describe(config: Mapping[str, Any]) -> str:
    """A configuration in one line, without the measured costs of a cascade."""
    if config["kind"] == "cascade":
        return "cascade: " + ", then ".join(map(describe, config["members"]))
    fields = []
    for field, value in config.items():
        if field == "stop":
            fields += [] if value["kind"] == "length" else [f"stop={value['kind']} {value.get('threshold', '')}".strip()]
        elif field not in ("kind", "verify_cost", "draft_cost") and value != "":
            fields.append(f"{field}={value}")
    return f"{config['kind']} ({', '.join(fields)})" if fields else str(config["kind"])

"""Outputs that end with their first token, which the prefill gives: they have no speed, and speedups leave them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def measured_prompts(figures: Mapping[str, Any]) -> int:
    """Return the number of prompts that a speedup rests on: without those whose output ended with its first token."""
    return int(figures["prompts"] - figures.get("empty_prompts", 0))  # earlier versions did not count the latter


def empty_note(figures: Mapping[str, Any]) -> list[str]:
    """Return the lines that count the prompts without a speed; none if all have one."""
    if not figures.get("empty_prompts"):
        return []
    counts = f"{figures['empty_prompts']} of {figures['prompts']}"
    return ["", f"The outputs of {counts} prompts end with their first token. Speedups leave them out."]


def speedup_cells(figures: Mapping[str, Any], digits: int) -> str:
    """Return the cells of a table with the speedup and its interval; they are empty if no prompt has a speed."""
    if not measured_prompts(figures):
        return "|"
    value, low, high = (f"{figures[name]:.{digits}f}" for name in ("speedup", "speedup_low", "speedup_high"))
    return f"{value} | {low} to {high}"

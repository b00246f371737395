"""Markdown of generated pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table; nothing where there are no rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines] if lines else []


def folded(title: str, lines: Sequence[str]) -> list[str]:
    """Lines that a click on the title shows; nothing where there are none."""
    return ["", f"<details><summary>{title}</summary>", "", *lines, "", "</details>"] if lines else []


def anchor(title: str) -> str:
    """The name that a section's title has in links."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")

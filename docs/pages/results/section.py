"""A section of the page of results, and the commands that measure its figures again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 116  # of a line of a command


@dataclass(frozen=True)
class Section:
    """One comparison: what was compared, what its records hold, the commands that measure it again, and notes."""

    title: str
    compared: str
    body: Sequence[str]
    commands: Sequence[str]
    notes: Sequence[str] = ()

    def lines(self) -> list[str]:
        notes = [f"- {note}" for note in self.notes]
        commands = [line for command in self.commands for line in _wrapped(command)]
        return ["", f"## {self.title}", "", self.compared, "", *self.body, *notes, "", "```bash", *commands, "```"]


def _wrapped(command: str) -> list[str]:
    """A command in lines of at most ``WIDTH`` where possible."""
    command = re.sub(r"^(\w+=\S+ )?searches\.", r"\1.venv/bin/python -m searches.", command)
    lines = [""]
    for word in re.findall(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""", command):
        if lines[-1] and len(lines[-1]) + len(word) > WIDTH:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]

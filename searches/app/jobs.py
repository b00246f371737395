"""The jobs of a multirun in one process: a table of their outcomes, and the exit code of them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MILDEST = (0, 3, 4, 2, 1)
"""Exit codes, worst last: success, weaker, refuted, bad input, unexpected error. Others, such as of signals, are worse."""


@dataclass(frozen=True)
class Job:
    """A job that has ended.

    Args:
        overrides: of its configuration.
        code: the exit code that it would have as a program.
        outcome: in one line.
    """

    overrides: tuple[str, ...]
    code: int
    outcome: str


def worst_code(jobs: Sequence[Job]) -> int:
    """Return the worst exit code of jobs; 0 without any."""
    codes = [*_MILDEST, *sorted({job.code for job in jobs}.difference(_MILDEST))]
    return max((job.code for job in jobs), default=0, key=codes.index)


def table(jobs: Sequence[Job]) -> str:
    """Return a table in Markdown with the overrides that differ between jobs and with the outcomes."""
    common = set.intersection(*(set(job.overrides) for job in jobs))
    rows = ["| job | exit code | outcome |", "|---|---|---|"]
    for job in jobs:
        cells = " ".join(each for each in job.overrides if each not in common), str(job.code), job.outcome
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)

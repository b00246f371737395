"""The jobs of a multirun: a table of their outcomes, and the exit code of them all."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

FINISHED = "finished"

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


class JobFailed(Exception):
    """The failure of a job that a launcher ran elsewhere; it carries everything that ends the command that started it.

    Args:
        code: the exit code of the job.
        line: what the job printed, in one line.
    """

    def __init__(self, code: int, line: str) -> None:
        super().__init__(code, line)  # the arguments alone are pickled
        self.code, self.line = code, line


def launched_jobs(error: BaseException) -> list[Job]:
    """Return the jobs that a launcher ran elsewhere, of which Hydra raises the first failure alone."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    sweep = next((frame.f_locals for frame in frames if frame.f_code.co_qualname == "BasicSweeper.sweep"), {})
    jobs = []
    for returned in sweep.get("results", ()):
        code, outcome, failure = 0, FINISHED, returned._return_value
        if isinstance(failure, JobFailed):
            code, outcome = failure.code, failure.line
        elif isinstance(failure, Exception):  # of the launcher, such as a job that was killed
            code, outcome = 1, type(failure).__name__
        jobs.append(Job(tuple(returned.overrides), code, outcome))
    return jobs


def worst(codes: Sequence[int]) -> int:
    """Return the worst of exit codes."""
    return max(codes, key=[*_MILDEST, *sorted(set(codes).difference(_MILDEST))].index)


def table(jobs: Sequence[Job]) -> str:
    """Return a table in Markdown with the overrides that differ between jobs and with the outcomes."""
    common = set.intersection(*(set(job.overrides) for job in jobs))
    rows = ["| job | exit code | outcome |", "|---|---|---|"]
    for job in jobs:
        cells = " ".join(each.lstrip("+") for each in job.overrides if each not in common), str(job.code), job.outcome
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)

"""Errors of compilers and devices in one line."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Return the first line of an error, with the next one if the first only introduces it; its type if it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])

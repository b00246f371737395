"""Who else writes here? Of programs that need the same in one outputs folder, one makes it; the others wait, and find it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import filelock

Key = TypeVar("Key")
Found = TypeVar("Found")


def share_work(paths: Mapping[Key, Path], work: Callable[[Key], Found]) -> dict[Key, Found]:
    """Share work with processes that have the same to do: first what none of them is at, then what they were at.

    Args:
        paths: what the work on each key writes.
        work: does it, or finds it written already.
    """
    found: dict[Key, Found] = {}
    for key, path in paths.items():
        with exclusive_if_free(path) as free:
            if free:
                found[key] = work(key)
    for key, path in paths.items():
        if key not in found:  # another process is at it, and finishes it unless it is killed
            with exclusive(path):
                found[key] = work(key)
    return found


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Be the only one to write something, once nobody else does; a program that is killed no longer does.

    Args:
        path: a file, or a folder; neither has to exist.
    """
    with exclusive_if_free(path) as free:
        if free:
            yield
            return
    print(f"waiting for another program, which writes {path}", flush=True)
    with _lock(path):
        yield


@contextlib.contextmanager
def exclusive_if_free(path: Path) -> Iterator[bool]:
    """As :func:`turn`, but where somebody else is writing, say so instead of waiting."""
    try:
        held = _lock(path).acquire(blocking=False)
    except filelock.Timeout:
        yield False
        return
    with held:
        yield True


def _lock(path: Path) -> filelock.BaseFileLock:
    path.parent.mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(path.with_name(f".{path.name}.lock"))

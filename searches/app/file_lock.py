"""File locks, so that programs that need the same file in one outputs folder make it once.

One program makes the file. The others wait, and then find it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import filelock

Key = TypeVar("Key")
Result = TypeVar("Result")


def share_work(paths: Mapping[Key, Path], work: Callable[[Key], Result]) -> dict[Key, Result]:
    """Do work on keys, each of which writes a file, and share it with other processes that have the same work to do.

    ``work`` loads a result that exists. Keys that no other process works on come first.
    """
    results: dict[Key, Result] = {}
    for key, path in paths.items():
        with exclusive_if_free(path) as free:
            if free:
                results[key] = work(key)
    for key, path in paths.items():
        if key not in results:  # another process works on it; unless it is killed, the result is there after the wait
            with exclusive(path):
                results[key] = work(key)
    return results


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Wait until no other process writes a file or folder, then hold its lock, which a killed process releases."""
    with exclusive_if_free(path) as free:
        if free:
            yield
            return
    print(f"waiting for another program, which writes {path}", flush=True)
    with _lock(path):
        yield


@contextlib.contextmanager
def exclusive_if_free(path: Path) -> Iterator[bool]:
    """Hold the lock as :func:`exclusive` does, or yield False at once if another process holds it."""
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

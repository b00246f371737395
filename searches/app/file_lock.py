"""File locks, so that programs that need the same file in one outputs folder make it once.

One program makes the file. The others wait, and then find it.
"""

from __future__ import annotations

import contextlib
import errno
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import filelock

from layerskip.files import beside

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
_POLL_SECONDS = 0.05
_without_locks: set[Path] = set()
"""Folders that a line was printed for."""
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
    while True:
        with exclusive_if_free(path) as free:
            if free:
                yield
                return
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def exclusive_if_free(path: Path) -> Iterator[bool]:
    """Hold the lock as :func:`exclusive` does, or yield False at once if another process holds it."""
    with locked_if_free(beside(path, "lock")) as free:
        yield free


@contextlib.contextmanager
def locked_if_free(file: Path) -> Iterator[bool]:
    """Hold a lock, or yield False if another process holds it. Where the file system has no locks, a second file is one.

    Args:
        file: of the lock; its folder is created. The kernel releases it with the process.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = _acquired(file)
    except filelock.Timeout:
        yield False
        return
    with held:
        yield True


def _acquired(file: Path) -> contextlib.AbstractContextManager[object]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # of a fallback to the same file, which says nothing of what to do
            return filelock.FileLock(file).acquire(blocking=False)
    except (OSError, UserWarning, NotImplementedError) as error:
        if getattr(error, "errno", errno.ENOSYS) not in _NO_LOCKS:
            raise
    marker = file.with_name(f"{file.name}.held")
    if marker.parent not in _without_locks:
        _without_locks.add(marker.parent)
        print(
            f"the file system of {file.parent} has no locks; {marker.name} is one: delete it if its program was killed",
            flush=True,
        )
    return filelock.SoftFileLock(marker).acquire(blocking=False)

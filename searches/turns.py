"""Who else writes here? Of programs that need the same in one outputs folder, one makes it; the others wait, and find it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import filelock


@contextlib.contextmanager
def turn(path: Path) -> Iterator[None]:
    """Be the only one to write something, once nobody else does; a program that is killed no longer does.

    Args:
        path: a file, or a folder; neither has to exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"))
    try:
        held = lock.acquire(blocking=False)
    except filelock.Timeout:
        print(f"waiting for another program, which writes {path}", flush=True)
        held = lock.acquire()
    with held:
        yield

"""Garbage collection in processes of tests."""

from __future__ import annotations

import gc


def keep_imports() -> None:
    """Exclude all imported objects from garbage collection, which would scan them again and again, and collect less often.

    So few other objects are left that Python would look through all of them all the time. Tests that need a collection ask
    for one.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)

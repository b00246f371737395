"""Work for which memory may not suffice."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from layerskip.device.memory import is_out_of_memory, release_memory

Result = TypeVar("Result")


def within_memory(work: Callable[[], Result]) -> Result | None:
    """Return the result of some work; None, with memory released, if memory does not suffice."""
    try:
        return work()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    release_memory()  # only here: the handled error refers to the memory
    return None

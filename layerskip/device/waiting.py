"""Whether operations may wait for a GPU, by torch's synchronisation debug mode."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def waiting(mode: str) -> Iterator[None]:
    """Refuse operations that wait for a GPU within the ``with`` block, or allow them; all threads are affected.

    Args:
        mode: ``error`` raises a ``RuntimeError`` in place of waiting; ``default`` waits, also where a caller forbids it.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    _set(mode)
    try:
        yield
    finally:
        _set(before)


def _set(mode: str | int) -> None:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch warns that not all waits are found
        torch.cuda.set_sync_debug_mode(mode)

"""Handling of Ctrl-C: measurements end at once, writing is completed first.

Python raises KeyboardInterrupt at an arbitrary point of the program. Inside a database driver it surfaces as another error,
or leaves a transaction open, after which nothing more can be written.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130


@contextlib.contextmanager
def defer_interrupt() -> Iterator[None]:
    """Defer the first Ctrl-C until a block, or a function decorated with this, has ended. A second one ends it at once."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield
        return
    held: list[FrameType | None] = []

    def hold(_number: int, frame: FrameType | None) -> None:
        if held:
            raise KeyboardInterrupt
        held.append(frame)

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held and callable(before):
            before(signal.SIGINT, held[0])


def is_interrupt(error: BaseException) -> bool:
    """Return whether Ctrl-C caused an error, directly or through an error that a library raised from it."""
    return any(isinstance(link, KeyboardInterrupt) for link in error_chain(error))


def error_chain(error: BaseException) -> list[BaseException]:
    """Return the error and its causes, last raised first."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def resend_interrupt(dropped: sys.UnraisableHookArgs) -> None:
    """Send Ctrl-C again shortly after Python dropped it, because it was raised in a finaliser (``sys.unraisablehook``)."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        again = (threading.main_thread().ident, signal.SIGINT)
        threading.Timer(0.05, signal.pthread_kill, again).start()
    else:
        sys.__unraisablehook__(dropped)

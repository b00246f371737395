"""What does Ctrl-C do? It ends what is measured at once, and waits for what is being written.

Python raises KeyboardInterrupt wherever the program happens to be. Raised inside a database's driver it comes out as another
error, or leaves a transaction open behind which nothing more can be written.
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
def undisturbed() -> Iterator[None]:
    """Hold the first Ctrl-C back until a block, or a function that this decorates, has ended; a second one ends it at once.

    Raises:
        KeyboardInterrupt: behind the block, where Ctrl-C came during it.
    """
    if threading.current_thread() is not threading.main_thread():  # no other thread hears of signals
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
    """Whether Ctrl-C is underneath an error: it may reach a library, which then raises an error of its own over it."""
    return any(isinstance(link, KeyboardInterrupt) for link in causes(error))


def causes(error: BaseException) -> list[BaseException]:
    """The error and what is underneath it, last raised first."""
    found = [error]
    while (cause := found[-1].__cause__ or found[-1].__context__) is not None and cause not in found:
        found.append(cause)
    return found


def interrupt_again(dropped: sys.UnraisableHookArgs) -> None:
    """Ctrl-C may reach a finaliser, out of which Python lets no error: give it once more, in a moment."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        again = (threading.main_thread().ident, signal.SIGINT)
        threading.Timer(0.05, signal.pthread_kill, again).start()
    else:
        sys.__unraisablehook__(dropped)

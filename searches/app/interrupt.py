"""Handling of Ctrl-C, SIGTERM and SIGHUP: measurements end at once, writing is completed first.

Python raises KeyboardInterrupt at an arbitrary point of the program. Inside a database driver it surfaces as another error,
or leaves a transaction open, after which nothing more can be written. SIGTERM (Slurm, Docker, systemd) and SIGHUP (a
terminal that closes) are raised likewise, as :class:`Terminated`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT
_TERMINATING = (signal.SIGTERM, signal.SIGHUP)
_ENDING: tuple[int, ...] = (signal.SIGINT, *_TERMINATING)
_Handler = Callable[[int, FrameType | None], object]


class Terminated(KeyboardInterrupt):
    """The end that SIGTERM or SIGHUP asks for; the argument is the number of the signal."""


def end_at_once(number: int, _frame: FrameType | None) -> None:
    """Handle a signal before a program has begun, such as while it imports."""
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted before it began\n")
    os._exit(128 + number)


def guard_imports() -> None:
    """End this process with one line if a signal comes before :func:`interruptible`."""
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, end_at_once)


def guard_exit(code: int) -> None:
    """End this process with its exit code at once if a signal comes while it exits."""
    for number in _ENDING:
        if signal.getsignal(number) is end_at_once:
            signal.signal(number, lambda *_: os._exit(code))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise :class:`Terminated` for SIGTERM and SIGHUP, and KeyboardInterrupt for Ctrl-C, within a block.

    A signal that is ignored (nohup) or has a handler (submitit submits a job again) keeps it.
    """
    begun: dict[int, _Handler] = {}
    if threading.current_thread() is threading.main_thread():  # only it handles signals
        if signal.getsignal(signal.SIGINT) is end_at_once:
            begun[signal.SIGINT] = signal.default_int_handler
        begun |= {number: _terminate for number in _TERMINATING if signal.getsignal(number) in (signal.SIG_DFL, end_at_once)}
    with _handling(begun):
        yield


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    # A terminal that closes sends SIGHUP twice, and what ends a group of processes may send more. They all mean this end.
    for each in _TERMINATING:
        if signal.getsignal(each) is _terminate:
            signal.signal(each, lambda *_: None)  # processes that are started later would inherit SIG_IGN
    raise Terminated(number)


@contextlib.contextmanager
def _handling(handlers: dict[int, _Handler]) -> Iterator[None]:
    """Handle signals otherwise within a block."""
    with contextlib.ExitStack() as restored:  # calls all of its callbacks, even if one is interrupted
        for number, handler in handlers.items():
            restored.callback(signal.signal, number, signal.getsignal(number))
            signal.signal(number, handler)
        yield


@contextlib.contextmanager
def defer_interrupt() -> Iterator[None]:
    """Defer the first signal until a block, or a function decorated with this, has ended.

    A further Ctrl-C ends it at once.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    before = {number: handler for number in _ENDING if callable(handler := signal.getsignal(number))}

    def hold(number: int, frame: FrameType | None) -> None:
        if not held:
            held.append((number, frame))
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    try:
        with _handling(dict.fromkeys(before, hold)):
            yield
    finally:
        if held:
            before[held[0][0]](*held[0])


def is_interrupt(error: BaseException) -> bool:
    """Return whether a signal caused an error, directly or through an error that a library raised from it."""
    return any(isinstance(link, KeyboardInterrupt) for link in error_chain(error))


def interrupt_code(error: BaseException) -> int:
    """Return the exit code of a program that a signal interrupted: 128 and its number."""
    numbers = (link.args[0] for link in error_chain(error) if isinstance(link, Terminated))
    return 128 + int(next(numbers, signal.SIGINT))


def error_chain(error: BaseException) -> list[BaseException]:
    """Return the error and its causes, last raised first."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def resend_interrupt(dropped: sys.UnraisableHookArgs) -> None:
    """Send a signal again shortly after Python dropped it, because it was raised in a finaliser (``sys.unraisablehook``)."""
    if not issubclass(dropped.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    number: int = signal.SIGINT
    if isinstance(dropped.exc_value, Terminated):
        (number,) = dropped.exc_value.args
        signal.signal(number, _terminate)  # once more
    threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, number)).start()

"""Ctrl-C waits until writing has finished, and for nothing else."""

from __future__ import annotations

import signal
import sqlite3
import threading
from collections.abc import Iterator

import pytest

from searches.app.interrupt import (
    Terminated,
    defer_interrupt,
    interrupt_code,
    interruptible,
    is_interrupt,
)

pytestmark = pytest.mark.system


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restores what a test does with signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_a_second_ctrl_c_does_not_wait_for_a_server_that_hangs() -> None:
    reached = []

    @defer_interrupt()
    def hang() -> None:
        ctrl_c()
        reached.append("one")
        ctrl_c()
        reached.append("two")

    with pytest.raises(KeyboardInterrupt):
        hang()
    assert reached == ["one"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_write_is_raised_or_is_the_context_of_the_interrupt() -> None:
    @defer_interrupt()
    def fail(interrupted: bool) -> None:
        if interrupted:
            ctrl_c()
        raise sqlite3.OperationalError("disk full")

    with pytest.raises(sqlite3.OperationalError):
        fail(interrupted=False)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt) as interrupt:
            fail(interrupted=True)
        assert isinstance(interrupt.value.__context__, sqlite3.OperationalError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    wrapped = sqlite3.OperationalError("database is locked")
    assert not is_interrupt(wrapped)
    wrapped.__cause__ = KeyboardInterrupt()  # a driver raises its own error from it
    assert is_interrupt(wrapped)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_a_program_waits_for_a_write_and_comes_once(number: signal.Signals, handlers: None) -> None:
    written = []

    @defer_interrupt()
    def write() -> None:
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        written.append("whole")

    with interruptible():
        with pytest.raises(Terminated) as end:
            write()
        signal.raise_signal(signal.SIGHUP)  # while the program ends
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()  # a further Ctrl-C ends that at once
    assert written == ["whole"]
    assert interrupt_code(end.value) == 128 + number
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_signal_that_is_ignored_or_has_a_handler_keeps_it(handlers: None) -> None:
    seen = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))  # submitit
    with interruptible(), defer_interrupt():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
    assert seen == [signal.SIGTERM]


def test_other_threads_handle_no_signals() -> None:
    found = []

    @defer_interrupt()
    def begin() -> None:
        with interruptible():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]

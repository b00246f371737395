"""Ctrl-C waits until writing has finished, and for nothing else."""

from __future__ import annotations

import signal
import sqlite3
import sys
import threading
from types import SimpleNamespace

import pytest

from searches.app.interrupt import defer_interrupt, is_interrupt, resend_interrupt


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_a_deferred_interrupt_lets_a_write_finish() -> None:
    written = []

    @defer_interrupt()
    def write(text: str) -> None:
        ctrl_c()
        written.append(text)

    for text in ("one", "other"):
        with pytest.raises(KeyboardInterrupt):
            write(text)
    assert written == ["one", "other"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_write_within_a_write_waits_for_the_outer_one() -> None:
    written = []

    @defer_interrupt()
    def write() -> None:
        defer_interrupt()(ctrl_c)()
        written.append("outer")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert written == ["outer"]


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
    with pytest.raises(KeyboardInterrupt) as interrupt:
        fail(interrupted=True)
    assert isinstance(interrupt.value.__context__, sqlite3.OperationalError)


def test_other_threads_defer_nothing() -> None:
    done = []

    @defer_interrupt()
    def write() -> None:
        done.append(threading.current_thread())

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert done == [thread]


def test_an_interrupt_is_recognised_as_the_cause_of_a_drivers_error() -> None:
    def commit() -> None:
        try:
            ctrl_c()
        except KeyboardInterrupt as error:
            raise sqlite3.OperationalError("database is locked") from error

    with pytest.raises(sqlite3.OperationalError) as wrapped:
        commit()
    assert is_interrupt(wrapped.value)
    assert not is_interrupt(sqlite3.OperationalError("database is locked"))


def test_another_error_in_a_finaliser_is_shown_and_interrupts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, sent = [], []
    monkeypatch.setattr(sys, "__unraisablehook__", shown.append)
    monkeypatch.setattr(signal, "pthread_kill", lambda *again: sent.append(again))
    dropped = SimpleNamespace(exc_type=ValueError)
    resend_interrupt(dropped)  # type: ignore[arg-type]
    assert (shown, sent) == ([dropped], [])


def test_a_ctrl_c_in_a_finaliser_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, done = [], threading.Event()

    def send(thread: int, number: int) -> None:
        sent.append((thread, number))
        done.set()

    monkeypatch.setattr(signal, "pthread_kill", send)
    resend_interrupt(SimpleNamespace(exc_type=KeyboardInterrupt))  # type: ignore[arg-type]
    assert done.wait(10)
    assert sent == [(threading.main_thread().ident, signal.SIGINT)]

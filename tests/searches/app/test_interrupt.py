"""Ctrl-C waits for what is being written, and for nothing else."""

from __future__ import annotations

import signal
import sqlite3
import threading

import pytest

from searches.app.interrupt import is_interrupt, undisturbed


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_what_is_written_is_written_whole() -> None:
    written = []

    @undisturbed()
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

    @undisturbed()
    def write() -> None:
        undisturbed()(ctrl_c)()
        written.append("outer")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert written == ["outer"]


def test_a_second_ctrl_c_does_not_wait_for_a_server_that_hangs() -> None:
    reached = []

    @undisturbed()
    def hang() -> None:
        ctrl_c()
        reached.append("one")
        ctrl_c()
        reached.append("two")

    with pytest.raises(KeyboardInterrupt):
        hang()
    assert reached == ["one"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_write_is_told_or_is_under_the_interrupt() -> None:
    @undisturbed()
    def fail(interrupted: bool) -> None:
        if interrupted:
            ctrl_c()
        raise sqlite3.OperationalError("disk full")

    with pytest.raises(sqlite3.OperationalError):
        fail(interrupted=False)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        fail(interrupted=True)
    assert isinstance(interrupt.value.__context__, sqlite3.OperationalError)


def test_other_threads_hear_of_no_signal() -> None:
    done = []

    @undisturbed()
    def write() -> None:
        done.append(threading.current_thread())

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert done == [thread]


def test_an_interrupt_is_known_under_what_a_driver_makes_of_it() -> None:
    def commit() -> None:
        try:
            ctrl_c()
        except KeyboardInterrupt as error:
            raise sqlite3.OperationalError("database is locked") from error

    with pytest.raises(sqlite3.OperationalError) as wrapped:
        commit()
    assert is_interrupt(wrapped.value)
    assert not is_interrupt(sqlite3.OperationalError("database is locked"))

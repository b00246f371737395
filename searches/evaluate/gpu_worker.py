"""One part of ``searches.evaluate.gpu`` in a process of its own, which ends after its seconds whatever it does.

A process of its own keeps the rest of a run alive where a part hangs, crashes, or leaves the device in a state in which
nothing runs any more. Rows arrive one by one, so those before the end are kept.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from layerskip.device.memory import is_out_of_memory, release_memory
from searches.app.application import explain

Row = dict[str, Any]
Known = Mapping[str, Any]
"""What the ``device`` part found; see :func:`searches.evaluate.gpu_device.describe_device`."""
Message = tuple[str, Any]
"""``step`` with what begins, ``row`` with a name and a row, ``log``, ``error`` or ``refused`` with one line, or ``end``."""
Part = Callable[[DictConfig, Known, "Report"], None]

_EXIT_SECONDS = 10  # that a process may take to exit
_LONGEST_LINE = 300  # characters of an error or of a warning


class Report:
    """The way of a part's rows to the program.

    Args:
        send: takes the messages.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send

    def step(self, name: str) -> None:
        """Report what begins."""
        self._send(("step", name))

    def row(self, name: str, row: Row) -> None:
        """Report a row, which replaces an earlier one of that name."""
        self._send(("row", (name, _finite(row))))

    def attempt(self, name: str, measure: Callable[[], Row]) -> Row:
        """Measure and report one row. An error becomes the row, and what it held is freed.

        Returns:
            The row, with ``error``, or ``left_out`` where it does not fit into the memory, in place of figures.
        """
        self.step(name)
        row: Row | None = None
        try:
            row = measure()
        except Exception as error:
            failed = {"left_out": "out of memory"} if is_out_of_memory(error) else {"error": one_line(error)}
            traceback.print_exc()  # the record has one line of it
        if row is None:
            row = failed
            release_memory()  # after the except block, as the error keeps its frames
        self.row(name, row)
        return row


def run_part(name: str, part: Part, config: DictConfig, known: Known, seconds: float) -> Generator[Message, None, None]:
    """Run a part in a new process and yield its messages. It ends with the part, with its seconds, or with the generator.

    Args:
        name: of the part.
        part: a function of a module.
        config: configuration ``conf/gpu.yaml``.
        known: what the ``device`` part found.
        seconds: limit, start of the process included.
    """
    # A process that was forked after a library has asked for the number of GPUs cannot use them. Without a GPU, forking
    # saves the seconds that imports take.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload([part.__module__])
    receiver, sender = context.Pipe(duplex=False)
    fields = OmegaConf.to_container(config)
    process: BaseProcess = context.Process(target=_work, args=(part, fields, dict(known), sender))
    deadline, doing = monotonic() + seconds, "its start"
    process.start()
    sender.close()
    try:
        while True:
            if not receiver.poll(max(0.0, deadline - monotonic())):
                yield "error", f"seconds.{name}: {seconds:g} seconds were over during {doing}"
                return
            try:
                message = receiver.recv()
            except EOFError:
                process.join(_EXIT_SECONDS)
                yield "error", f"the process ended with code {process.exitcode} during {doing}"
                return
            if message[0] == "end":
                process.join(_EXIT_SECONDS)
                return
            if message[0] == "step":
                doing = message[1]
            yield message
    finally:
        _end(process)
        receiver.close()


def _work(part: Part, fields: Any, known: Known, sender: Connection) -> None:
    os.setsid()  # the group of everything that this process starts
    library = logging.getLogger("layerskip")
    library.setLevel(logging.DEBUG)
    library.addHandler(_Log(sender.send))
    try:
        part(OmegaConf.create(fields), known, Report(sender.send))
    except Exception as error:
        line = explain(error)
        if line is None:
            traceback.print_exc()
        sender.send(("error", one_line(error)) if line is None else ("refused", line))
    sender.send(("end", None))


class _Log(logging.Handler):
    """Sends the warnings of the library, such as that a model's layers cannot be compiled, and prints tracebacks."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send a warning as one line, or print the error that a debugging message has."""
        if record.levelno >= logging.WARNING:
            self._send(("log", " ".join(record.getMessage().split())[:_LONGEST_LINE]))
        elif record.exc_info is not None:
            traceback.print_exception(record.exc_info[1])


def _end(process: BaseProcess) -> None:
    """Kill a process and everything that it has started."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # it may not have become the leader of its group
    process.join()


def _finite(value: Any) -> Any:
    """Return a value with None in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def one_line(error: BaseException) -> str:
    """Return an error's type and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST_LINE]

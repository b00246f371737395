"""The identity of a process, by which others on the same machine see at once that it has ended."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """Return the identity of this process: ``host``, ``pid``, ``started``, and ``machine``, which is empty if unknown.

    ``machine`` holds the start of the kernel and the namespace of process numbers: containers may share a host's name.
    """
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": start_of(os.getpid()), "machine": _machine()}


def has_ended(identity: Mapping[str, Any]) -> bool:
    """Return True if a process of this machine has ended; False if it runs, or cannot be seen from here."""
    machine = _machine()
    return bool(machine) and identity["machine"] == machine and start_of(identity["pid"]) != identity["started"]


@cache
def _machine() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_of(pid: int) -> str:
    """Return the start of a process in clock ticks since the machine's; empty if it has ended, or without ``/proc``."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # fields 3 (state) and 22 (start time) of proc(5)

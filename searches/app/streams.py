"""Standard output and errors that outlive their reader: a program goes on when nobody reads what it prints.

``| head -1`` closes a pipe, a disk fills up, a terminal goes away, and not every encoding has every character.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Lossy(io.FileIO):
    """A file descriptor that drops what cannot be written.

    Attributes:
        error: the first reason other than a reader that went away.
    """

    error: OSError | None = None

    def write(self, data: ReadableBuffer) -> int:
        """Write or drop the data; return the number of bytes."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EPIPE and self.error is None:
                self.error = error
            return memoryview(data).nbytes


def tolerate_loss() -> None:
    """Let ``sys.stdout`` and ``sys.stderr`` escape characters that they cannot encode, and drop what cannot be written."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or _lossy(stream) is not None:  # someone else's, or done before
            continue
        if stream is None:  # it was closed before the program began
            raw, encoding, is_flushed = _Lossy(os.devnull, "w"), "utf-8", False
        else:
            with contextlib.suppress(OSError):
                stream.flush()
            raw, encoding = _Lossy(stream.fileno(), "w", closefd=False), stream.encoding
            os.set_blocking(stream.fileno(), True)  # another program may have made the terminal or the pipe non-blocking
            is_flushed = stream.line_buffering or stream.write_through
        buffer = io.BufferedWriter(raw)
        wrapped = io.TextIOWrapper(buffer, encoding=encoding, errors="backslashreplace", line_buffering=is_flushed)
        setattr(sys, name, wrapped)
        setattr(sys, f"__{name}__", wrapped)


def hold_descriptors() -> None:
    """Open descriptors 0 to 2 where they are closed. A database would get their numbers, and messages of libraries."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def lost_output() -> OSError | None:
    """Return why standard output is incomplete; None if it is complete, or if its reader did not want more."""
    sys.stdout.flush()
    raw = _lossy(sys.stdout)
    return None if raw is None else raw.error


def _lossy(stream: object) -> _Lossy | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Lossy) else None

"""Atomic file writes, digests of plain values, and one error for a full disk."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_REACHED = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT)
UNUSABLE = (*DISK_FULL, *_NOT_REACHED, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Errors of a file system, which no program causes."""
_log = logging.getLogger(__name__)
_LONGEST_NAME = 200  # bytes; file systems take 255
_PROBE_BYTES = 2**16  # a disk that interrupted a write has no room for them
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")  # in messages of Rust libraries, which may have removed their file


def digest(value: Any) -> str:
    """Return the SHA-256 of a plain value, in hexadecimal; it names results that depend on this value alone."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically: a kill or a full disk leaves the file unchanged. NaN and infinities are a ``ValueError``."""
    with atomic_write(path, str(os.getpid())) as partial:
        partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Return what a JSON file holds; None without the file, and with a warning if it is damaged, as by a loss of power."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        _log.warning("%s is damaged, and left out", path)
        return None


def beside(path: Path, mark: str) -> Path:
    """Return a hidden file in the folder of a path, named after both."""
    return path.with_name(f".{short_name(path.name)}.{mark}")


def short_name(name: str) -> str:
    """Return a name that file systems take with something appended; the end of a long one becomes a digest."""
    return name if len(os.fsencode(name)) <= _LONGEST_NAME else f"{name[:40]}-{digest(name)[:12]}"


@contextmanager
def atomic_write(path: Path, mark: str = "partial") -> Iterator[Path]:
    """Yield a temporary path to write to, and move it to ``path``, whose folder is created, on success.

    A failure leaves ``path`` unchanged. A full disk is an ``OSError``, whatever a library raises. With a constant ``mark``,
    the file left by a kill is overwritten later; processes that write at the same time need different ones.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = beside(path, mark)
    try:
        with report_full_disk(path, partial):
            yield partial
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to write to, and move it to ``folder``, which must not hold anything, on success."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{short_name(folder.name)}.") as temporary:
        partial = Path(temporary) / folder.name
        with report_full_disk(folder, Path(temporary) / "probe"):
            yield partial
        partial.replace(folder)


@contextmanager
def report_full_disk(path: Path, probe: Path) -> Iterator[None]:
    """Convert errors of a full disk, for which libraries have their own, to an ``OSError`` that names ``path``.

    The file ``probe`` is extended to test whether the disk is full; the caller removes it.
    """
    try:
        yield
    except Exception as error:
        match = _RUST_ERROR.search(str(error))
        number = int(match[1]) if match else getattr(error, "errno", None) or _probe_error(probe)
        if number not in DISK_FULL or getattr(error, "filename", None):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def _probe_error(file: Path) -> int | None:
    """Return the error number of a failed write of some more bytes; None if it succeeds."""
    try:
        with file.open("ab") as probe:
            probe.write(bytes(_PROBE_BYTES))
    except OSError as error:
        return error.errno
    return None

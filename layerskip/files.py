"""How is a file written whole or not at all, what is it called after, and what is said where the disk is full?"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TRIED = 2**16  # bytes, for which a disk that broke off a write has no room
_NUMBER = re.compile(r"\(os error (\d+)\)")  # in what libraries in Rust say, which may have removed what they wrote


def digest(value: Any) -> str:
    """SHA-256 of a plain value, in hexadecimal: what is kept under it depends on nothing else."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write JSON beside the file and move it into place; a kill or a full disk leaves the file as it was.

    Raises:
        ValueError: the value holds NaN or an infinity, which JSON does not have.
        OSError: it cannot be written.
    """
    with whole(path, str(os.getpid())) as partial:
        partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def whole(path: Path, mark: str = "partial") -> Iterator[Path]:
    """A file beside another to write to, which is then moved into its place; what fails leaves that as it was.

    Args:
        path: of the file; its folder is made.
        mark: what the name ends with until then. One that is always the same is overwritten after a kill; programs that
            write one file at the same time need one each.

    Raises:
        OSError: the disk is full, whoever says so.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{mark}")
    try:
        with full_disk_told(path, partial):
            yield partial
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def full_disk_told(path: Path, tried: Path) -> Iterator[None]:
    """Say of a full disk that it is full: torch and safetensors raise errors of their own, and numpy one without a number.

    Args:
        path: of what is written, which the error names.
        tried: a file that the disk is asked to take some bytes more in; the caller removes it.

    Raises:
        OSError: the disk is full.
    """
    try:
        yield
    except Exception as error:
        said = _NUMBER.search(str(error))
        number = int(said[1]) if said else getattr(error, "errno", None) or _refusal(tried)
        if number not in DISK_FULL or getattr(error, "filename", None):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def _refusal(file: Path) -> int | None:
    """The number of the error with which a disk refuses a few bytes more; None where it takes them."""
    try:
        with file.open("ab") as more:
            more.write(bytes(_TRIED))
    except OSError as error:
        return error.errno
    return None

"""Checks of user input. Each refuses a bad value with an :class:`InputError` that begins with the field's name."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
from collections.abc import Sequence

from omegaconf import DictConfig

from layerskip import ConfigError
from layerskip.config import check_integer, check_text

_MIN_FREE_BYTES = 64 * 2**20
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i)?B|B)?")


class InputError(ValueError):
    """User input that cannot be used; the message begins with the field's name."""


def check_seed(seed: object) -> None:
    """Check a seed of random generators: an integer from 0 to 2^31 - 1."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise InputError(f"seed: {seed!r} is not a whole number from 0 to {2**31 - 1}")


def check_whole(name: str, value: object, minimum: int = 1, maximum: int | None = None) -> None:
    """Check an integer and its bounds, both inclusive."""
    try:
        check_integer(name, value, minimum, maximum)
    except ConfigError as error:
        raise InputError(str(error)) from None


def check_number(name: str, value: object, maximum: float = math.inf, or_zero: bool = False) -> None:
    """Check a positive number, or 0 if that is allowed, and its inclusive upper bound."""
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not (0 < number <= maximum or (or_zero and number == 0)):
        wanted = "a number above 0" if maximum == math.inf else f"a number above 0 and up to {maximum:g}"
        raise InputError(f"{name}: {value!r} is {'neither 0 nor' if or_zero else 'not'} {wanted}")


def read_bytes(name: str, value: object) -> int:
    """Return a number of bytes, at least 1, given as such or as a text like ``2GiB`` or ``500 MB``."""
    found = _SIZE.fullmatch(str(value))
    size = 0 if found is None else int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " "))
    if size < 1:
        raise InputError(f"{name}: {value!r} is not a number of bytes, such as 2_000_000_000 or 2GiB")
    return size


def check_flag(name: str, value: object) -> None:
    """Check a truth value."""
    if not isinstance(value, bool):
        raise InputError(f"{name}: {value!r} is neither true nor false")


def check_list(name: str, value: object, known: Sequence[str] | None = None, or_empty: bool = True) -> None:
    """Check a list: whether it may be empty, and the values that it may hold, which are any if ``known`` is None."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InputError(f"{name}: {value!r} is not a list, such as [a,b]")
    if not value and not or_empty:
        raise InputError(f"{name}: is empty")
    for item in value:
        if known is not None and item not in known:
            raise InputError(f"{name}: {item!r} is not one of {', '.join(known)}")


def check_output_paths(config: DictConfig) -> None:
    """Check before the program starts that it can write its record and its outputs folder, with 64 MB of free space."""
    if "outputs" in config:
        if not isinstance(config.outputs, (str, int)):  # YAML reads a folder name of digits as a number
            raise InputError(f"outputs: {config.outputs!r} is not the path of a folder")
        config.outputs = str(config.outputs)
        usage = shutil.disk_usage(check_folder("outputs", config.outputs))
        if usage.total and usage.free < _MIN_FREE_BYTES:  # a file system without an answer has a total of 0
            raise InputError(f"outputs: {config.outputs} has no space left; {_MIN_FREE_BYTES // 2**20} MB are needed")
    if config.get("record") is not None:
        config.record = str(config.record)
        if os.path.isdir(config.record):
            raise InputError(f"record: {config.record} is a folder, not a file")
        folder = os.path.dirname(os.path.abspath(config.record))
        check_folder("record", folder if os.path.exists(config.record) else config.record)


def check_folder(name: str, folder: str) -> str:
    """Check that a folder exists or can be created, and can be written to; return it, or its nearest parent that exists."""
    check_text(name, folder)
    place, missing = os.path.abspath(folder), list[str]()
    while not os.path.exists(place):
        place, part = os.path.split(place)
        missing.append(part)
    if not os.path.isdir(place):
        raise InputError(f"{name}: {place} is not a folder")
    if not os.access(place, os.W_OK):
        raise InputError(f"{name}: {place} cannot be written to")
    for part in missing:
        if len(os.fsencode(part)) > os.pathconf(place, "PC_NAME_MAX"):
            raise InputError(f"{name}: {part!r} cannot be the name of a file: {os.strerror(errno.ENAMETOOLONG)}")
    return place

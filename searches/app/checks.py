"""Checks of what the user gave: each refuses a bad value with one line that names the field."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from omegaconf import DictConfig

from layerskip import ConfigError
from layerskip.rules import check_integer

_LEAST_FREE_BYTES = 64 * 2**20


class InputError(ValueError):
    """Something that the user gave cannot be used; the message names the field."""


def check_seed(seed: object) -> None:
    """Refuse a seed that no generator takes.

    Raises:
        InputError: it is not a whole number of at least 0.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise InputError(f"seed: {seed!r} is not a whole number from 0 to {2**31 - 1}")


def check_whole(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Refuse what is no whole number of at least so much, and of at most so much where that is bounded.

    Raises:
        InputError: it is not.
    """
    try:
        check_integer(name, value, least, most)
    except ConfigError as error:
        raise InputError(str(error)) from None


def check_number(name: str, value: object, most: float = math.inf, or_zero: bool = False) -> None:
    """Refuse what is no number above 0, or 0 where that says something, and up to so much.

    Raises:
        InputError: it is not.
    """
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not (0 < number <= most or (or_zero and number == 0)):
        wanted = "a number above 0" if most == math.inf else f"a number above 0 and up to {most:g}"
        raise InputError(f"{name}: {value!r} is {'neither 0 nor' if or_zero else 'not'} {wanted}")


def check_share(name: str, value: object) -> None:
    """Refuse what is neither a share, from 0 to 1, nor None.

    Raises:
        InputError: it is not.
    """
    if value is not None:
        check_number(name, value, most=1, or_zero=True)


def check_flag(name: str, value: object) -> None:
    """Refuse what is no truth value.

    Raises:
        InputError: it is not.
    """
    if not isinstance(value, bool):
        raise InputError(f"{name}: {value!r} is neither true nor false")


def check_list(name: str, value: object, known: Sequence[str] | None = None, or_empty: bool = True) -> None:
    """Refuse what is no list, or has something in it that is not among what is known, or nothing where it needs something.

    Raises:
        InputError: it is not, or has.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InputError(f"{name}: {value!r} is not a list, such as [a,b]")
    if not value and not or_empty:
        raise InputError(f"{name}: is empty")
    for item in value:
        if known is not None and item not in known:
            raise InputError(f"{name}: {item!r} is not one of {', '.join(known)}")


def check_places(config: DictConfig) -> None:
    """Refuse to start where a program could not write what it is going to find out.

    Raises:
        InputError: its outputs folder or its record cannot be written, or less than 64 MB are free there.
    """
    if "outputs" in config:
        if not isinstance(config.outputs, (str, int)):  # a folder of digits is read as a number
            raise InputError(f"outputs: {config.outputs!r} is not the path of a folder")
        config.outputs = str(config.outputs)
        _check_room(config.outputs)
    if config.get("record") is not None:
        config.record = str(config.record)
        if os.path.isdir(config.record):
            raise InputError(f"record: {config.record} is a folder, not a file")
        check_folder("record", os.path.dirname(os.path.abspath(config.record)))


def _check_room(folder: str) -> None:
    stats = os.statvfs(check_folder("outputs", folder))
    if stats.f_bavail * stats.f_frsize < _LEAST_FREE_BYTES:
        raise InputError(f"outputs: {folder} has no space left; {_LEAST_FREE_BYTES // 2**20} MB are needed")


def check_folder(name: str, folder: str) -> str:
    """Refuse what cannot become a folder to write in; returns as much of it as exists."""
    place = os.path.abspath(folder)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        raise InputError(f"{name}: {place} is not a folder")
    if not os.access(place, os.W_OK):
        raise InputError(f"{name}: {place} cannot be written to")
    return place

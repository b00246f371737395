"""How does a program start and end? Hydra composes; bad input ends in one line and exit code 2, Ctrl-C in 130.

Unexpected errors keep their traceback and exit code 1, which no verdict shares: what was to be shown and was not ends in 4.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import hydra
import optuna
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from layerskip import (
    ConfigError,
    ExportError,
    MaskError,
    PromptError,
    SamplingError,
    TargetError,
    UnsupportedModel,
)
from layerskip.files import DISK_FULL
from layerskip.rules import check_integer

from .interrupt import INTERRUPTED, causes, interrupt_again, is_interrupt

CONF = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "conf")
BAD_INPUT = 2
NOT_SHOWN = 4
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


def made(config: DictConfig, part: str, **more: Any) -> Any:
    """Instantiate a part that another library checks; what that refuses names the part.

    Raises:
        InputError: it is refused.
    """
    try:
        return instantiate(config[part], **more)
    except InstantiationException as error:
        reason = next((link for link in causes(error) if isinstance(link, (ValueError, TypeError))), None)
        if reason is None or isinstance(reason, _INPUT_ERRORS):
            raise
        raise InputError(f"{part}: {_one_line(reason)}") from error


_INPUT_ERRORS = (
    InputError,
    ConfigError,
    ExportError,
    MaskError,
    PromptError,
    SamplingError,
    TargetError,
    UnsupportedModel,
)


def run(config_name: str, task: Callable[[DictConfig], Any], goes_on: bool = True) -> NoReturn:
    """Compose ``conf/<config_name>.yaml`` with the command line, run a task with it, and end the process.

    Args:
        config_name: of the program.
        task: what it does.
        goes_on: whether it keeps what it has found out, for the same command to go on from.
    """
    # Optuna marks what this program is built on (grouped TPE, the Wilcoxon pruner) as experimental.
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    warnings.filterwarnings("ignore", message="WilcoxonPruner finds steps")  # who leads may have fewer: trials race
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it raises what it logs the traceback of
    logging.getLogger("alembic").setLevel(logging.WARNING)

    if sys.unraisablehook is sys.__unraisablehook__:  # a test runner's own stays
        sys.unraisablehook = interrupt_again

    def guarded(config: DictConfig) -> None:
        # In here, so that Hydra does not put its own words before ours; it lets SystemExit pass.
        try:
            check_places(config)
            task(config)
        except (Exception, KeyboardInterrupt) as error:
            _end(error, goes_on)

    program = hydra.main(version_base="1.3", config_path=CONF, config_name=config_name)(guarded)
    try:
        program()
    except (Exception, KeyboardInterrupt) as error:
        _end(error, goes_on)
    sys.exit(0)


def _end(error: BaseException, goes_on: bool) -> NoReturn:
    if is_interrupt(error):
        print(f"interrupted; {'the same command goes on from here' if goes_on else 'nothing is kept'}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    line = explain(error)
    if line is None:
        traceback.print_exception(error)
        sys.exit(1)
    print(f"error: {line}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def explain(error: BaseException) -> str | None:
    """One line for an error that the user can mend; None for a defect, which deserves its traceback."""
    if isinstance(error, _INPUT_ERRORS):
        return _one_line(error)
    for link in causes(error):
        if isinstance(error, InstantiationException) and isinstance(link, _INPUT_ERRORS):
            return _one_line(link)
        if isinstance(link, OSError) and link.errno in DISK_FULL:
            return f"outputs: cannot write {link.filename or ''}: {os.strerror(link.errno or 0)}"
        if "database or disk is full" in str(link):
            return "outputs: cannot write the database: no space left on the disk"
    # What a `_target_` raised is not the command line's fault unless it was one of the errors above.
    if isinstance(error, (HydraException, OmegaConfBaseException)) and not isinstance(error, InstantiationException):
        return _one_line(error)
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())

"""How does a program start and end? Hydra composes; bad input ends in one line and exit code 2, Ctrl-C in 130.

Unexpected errors keep their traceback and exit code 1, which no verdict shares: what was to be shown and was not ends in 4.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import hydra
import optuna
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from layerskip import ConfigError, ExportError, MaskError, PromptError, SamplingError, TargetError, UnsupportedModel
from layerskip.files import DISK_FULL
from searches.app.checks import InputError, check_places
from searches.app.interrupt import INTERRUPTED, causes, interrupt_again, is_interrupt

CONF = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "conf")
BAD_INPUT = 2
NOT_SHOWN = 4


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

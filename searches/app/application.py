"""Start and end of every program: Hydra composes the configuration, and errors become exit codes.

Bad input ends with one line and exit code 2, Ctrl-C with 130, SIGTERM with 143, SIGHUP with 129. Unexpected errors keep
their traceback and exit code 1, which only a loss that ``searches.doctor`` finds shares. A result that was not confirmed
ends with 4.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import hydra
import optuna
from hydra._internal.core_plugins.basic_launcher import BasicLauncherConf
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from layerskip import ConfigError, ExportError, PlanError, PromptError, SamplingError, TargetError, UnsupportedModel
from layerskip.device.memory import is_out_of_memory
from layerskip.files import DISK_FULL, UNUSABLE
from layerskip.models.cache import CacheOverflow
from searches.app.checks import InputError, check_output_paths
from searches.app.composition import CONF, fill_defaults, prepare_overrides, store_drafters
from searches.app.interrupt import error_chain, guard_exit, interrupt_code, interruptible, is_interrupt, resend_interrupt
from searches.app.streams import lost_output, tolerate_loss

BAD_INPUT = 2
NOT_CONFIRMED = 4
_MILDEST = (0, 3, NOT_CONFIRMED, BAD_INPUT, 1)
"""Exit codes, worst last: success, weaker, refuted, bad input, unexpected error. Others, such as of signals, are worse."""
_INPUT_ERRORS = (
    *(InputError, ConfigError, ExportError, PlanError, PromptError, SamplingError, TargetError, UnsupportedModel),
    CacheOverflow,
)


def instantiate_part(config: DictConfig, part: str, **more: Any) -> Any:
    """Instantiate a part of the configuration; an argument that its library refuses becomes an :class:`InputError`."""
    try:
        return instantiate(config[part], **more)
    except InstantiationException as error:
        reason = next((link for link in error_chain(error) if isinstance(link, (ValueError, TypeError))), None)
        if reason is None or isinstance(reason, _INPUT_ERRORS):
            raise
        raise InputError(f"{part}: {_one_line(reason)}") from error


def run(config_name: str, task: Callable[[DictConfig], Any], resumable: bool = True, is_printed: bool = False) -> NoReturn:
    """Compose ``conf/<config_name>.yaml`` with the command line, run a task with it, and end the process.

    The same command continues a ``resumable`` program after an interruption. A result that is printed (``is_printed``) is
    lost on a full disk.
    """
    ended: list[tuple[str, int]] = []  # jobs of a multirun, with their exit codes

    def guarded(config: DictConfig) -> None:
        # Errors are handled in here, because Hydra prints its own message first. It lets SystemExit pass.
        _set_up()
        code, line, interrupted = 0, "", False
        try:
            with interruptible():
                check_output_paths(config)
                task(fill_defaults(config))
        except SystemExit as end:
            # submitit itself ends a job with a negative code before it submits the job again.
            if not (isinstance(end.code, int) and end.code > 0):
                raise
            code, line, interrupted = end.code, f"error: the job ended with exit code {end.code}", is_interrupt(end)
        except (Exception, KeyboardInterrupt) as error:
            interrupted = is_interrupt(error)
            code, line = _report(error, resumable)
        settings = HydraConfig.get()
        is_multirun = settings.mode == RunMode.MULTIRUN
        if is_multirun and settings.launcher._target_ != BasicLauncherConf._target_:  # Hydra's own, in this process
            if code:  # a launcher carries exceptions alone; with SystemExit, submitit waits and Ray starts again
                raise JobFailed(code, line)
            return
        ended.append((" ".join(settings.overrides.task), code))
        if code and (interrupted or not is_multirun):
            sys.exit(code)

    _set_up()
    store_drafters()
    program = hydra.main(version_base="1.3", config_path=CONF, config_name=config_name)(guarded)
    code = 0
    try:
        with interruptible():
            sys.argv[1:] = prepare_overrides(config_name, sys.argv[1:])
            program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except (Exception, KeyboardInterrupt) as error:
        code, _ = _report(error, resumable)
    if len(ended) > 1:
        print("\n".join(["| exit code | job |", "|---|---|", *(f"| {number} | {job} |" for job, number in ended)]))
    code = worst([code, *(number for _, number in ended)])
    code = _with_output(code, is_printed or not ended)  # without a job, Hydra printed its help
    guard_exit(code)
    sys.exit(code)


def _with_output(code: int, is_printed: bool) -> int:
    """Return the exit code of a program, with what became of its output: a full disk loses a result that is printed."""
    lost = lost_output()
    if lost is None:
        return code
    is_error = is_printed and not code
    print(f"{'error: ' if is_error else ''}standard output: incomplete: {os.strerror(lost.errno or 0)}", file=sys.stderr)
    return BAD_INPUT if is_error else code


def _set_up() -> None:
    """Set the filters of a process that runs a task, which a launcher may have started."""
    tolerate_loss()
    # Optuna marks grouped TPE and the Wilcoxon pruner as experimental.
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    # The best trial may have fewer steps than others, because trials race.
    warnings.filterwarnings("ignore", message="WilcoxonPruner finds steps")
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it logs the traceback of what it then raises
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if sys.unraisablehook is sys.__unraisablehook__:  # keep the hook of a test runner
        sys.unraisablehook = resend_interrupt


def _report(error: BaseException, resumable: bool) -> tuple[int, str]:
    """Print an error that ends the program; return the exit code and the last printed line."""
    if isinstance(error, JobFailed):
        code, line = error.code, error.line
    elif is_interrupt(error):
        kept = "the same command continues from here" if resumable else "nothing is kept"
        code, line = interrupt_code(error), f"interrupted; {kept}"
    elif (reason := explain(error)) is not None:
        code, line = BAD_INPUT, f"error: {reason}"
    elif _is_of_launcher(error):
        code, line = 1, f"error: hydra.launcher: {type(error).__name__}: {' '.join(str(error).splitlines()[:2])}"
    else:
        code, line = 1, "".join(traceback.format_exception(error)).rstrip()
    print(line, file=sys.stderr)
    return code, line.splitlines()[-1]


def _is_of_launcher(error: BaseException) -> bool:
    """Return whether an error was raised by a launcher, for example without its cluster, or when a job was killed."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(str(frame.f_globals.get("__name__")).startswith("hydra_plugins.") for frame, _ in frames)


def explain(error: BaseException) -> str | None:
    """Return one line for an error that the user can fix; None for a defect, which keeps its traceback."""
    if isinstance(error, _INPUT_ERRORS):
        return _one_line(error)
    for link in error_chain(error):
        if isinstance(error, InstantiationException) and isinstance(link, _INPUT_ERRORS):
            return _one_line(link)
        if isinstance(link, OSError) and link.errno in UNUSABLE and link.filename:
            return f"cannot write {link.filename}: {os.strerror(link.errno)}"
        if isinstance(link, OSError) and link.errno in DISK_FULL:
            return f"a file or the standard output cannot be written: {os.strerror(link.errno or 0)}"
        if "database or disk is full" in str(link):
            return "cannot write the database: no space left on the disk"
        if is_out_of_memory(link) or "could not create a primitive" in str(link):  # as oneDNN says it
            return f"memory: does not suffice, even for plain decoding: {_one_line(link)[:200] or 'none is left'}"
    # Any other error raised by a `_target_` is a defect, not a mistake on the command line.
    if isinstance(error, (HydraException, OmegaConfBaseException)) and not isinstance(error, InstantiationException):
        return _one_line(error)
    return None


def _one_line(error: BaseException) -> str:
    """Return the message of an error in one line. Others' text in it must not control the terminal."""
    line = " ".join(str(error).split())
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in line)


class JobFailed(Exception):
    """The failure of a job that a launcher ran elsewhere, with its exit code and the last line that it printed."""

    def __init__(self, code: int, line: str) -> None:
        super().__init__(code, line)  # the arguments alone are pickled
        self.code, self.line = code, line


def worst(codes: Sequence[int]) -> int:
    return max(codes, key=[*_MILDEST, *sorted(set(codes).difference(_MILDEST))].index)

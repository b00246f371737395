"""How does a search run, stop and go on? One Optuna study per name, in a journal file or any database.

The study is the truth: what is in it is done, whatever was killed. One process works on a study folder at a time (a lock
that the kernel releases with the process), so a trial found running is one that was killed; it is set aside and its choices
are queued again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import optuna
import sqlalchemy
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from .application import InputError
from .objective import Objective
from .space import SearchSpace

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
_SETTINGS = "settings"


@dataclass(frozen=True)
class StudySettings:
    """Which study, and how long.

    Args:
        name: None makes one of the target, the sampler, the seed and a digest of everything that changes results.
        n_trials: finished trials in the end, those of earlier runs of the same command included.
        storage: a database URL, or a journal file's path; None puts a journal file into the study's folder.
        max_seconds: no trial starts later than so many seconds after this run's first; None sets no limit.
    """

    name: str | None = None
    n_trials: int = 20
    storage: str | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.n_trials, int) or self.n_trials < 1:
            raise InputError(f"study.n_trials: {self.n_trials} is not a whole number of at least 1")
        if self.name is not None and (not self.name or "/" in self.name or self.name in (".", "..")):
            raise InputError(f"study.name: {self.name!r} cannot be the name of a folder")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a study's folder this process's own.

    Raises:
        InputError: another process is at work in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / "lock")
    try:
        with lock.acquire(blocking=False):
            yield
    except filelock.Timeout:
        raise InputError(f"study.name: another process is running the study in {folder}") from None


def open_journal(path: Path) -> BaseStorage:
    """A study's storage in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _drop_partial_line(path)
    return JournalStorage(JournalFileBackend(str(path)))


def open_database(url: str) -> BaseStorage:
    """A study's storage in a database.

    Raises:
        InputError: it cannot be reached.
    """
    # The driver that this project installs; SQLAlchemy would look for another one first.
    url = url.replace("postgresql://", "postgresql+psycopg://", 1)
    try:
        return RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
    except (sqlalchemy.exc.SQLAlchemyError, ImportError) as error:
        raise InputError(f"study.storage: cannot open {_without_password(url)}: {_first_line(error)}") from error


def _drop_partial_line(path: Path) -> None:
    """A full disk or a killed machine can leave half a line, which would spoil the next one."""
    if path.exists() and not (data := path.read_bytes()).endswith(b"\n") and data:
        with path.open("rb+") as journal:
            journal.truncate(data.rfind(b"\n") + 1)


def open_study(
    name: str,
    storage: BaseStorage,
    sampler: optuna.samplers.BaseSampler,
    pruner: optuna.pruners.BasePruner,
    settings: Mapping[str, Any],
) -> optuna.Study:
    """Create a study, or resume it with the settings that it was created with.

    Args:
        settings: everything that changes results, as flat plain values.

    Raises:
        InputError: the study exists with other settings; the message names the first that differs.
    """
    study = optuna.create_study(
        study_name=name, storage=storage, sampler=sampler, pruner=pruner, direction="maximize", load_if_exists=True
    )
    before = study.user_attrs.get(_SETTINGS)
    if before is None:
        study.set_user_attr(_SETTINGS, dict(settings))
        return study
    now = json.loads(json.dumps(dict(settings)))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise InputError(
                f"{key}: study {name} was made with {before.get(key)!r}, not {now.get(key)!r}; choose another study.name"
            )
    return study


def prepare(study: optuna.Study, space: SearchSpace) -> None:
    """Set killed trials aside and queue them again; queue the starting points that were not yet."""
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
        if "config" in trial.user_attrs:  # all its choices were made
            study.enqueue_trial(trial.params, user_attrs={"retry_of": trial.number})
    for config in space.starting_points():
        study.enqueue_trial(space.params(config), skip_if_exists=True)


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that count."""
    return study.get_trials(deepcopy=False, states=FINISHED)


def run_trials(
    study: optuna.Study,
    objective: Objective,
    settings: StudySettings,
    on_trial: Callable[[FrozenTrial], None],
) -> None:
    """Run trials until enough are finished.

    Args:
        on_trial: hears of every finished trial.

    Raises:
        KeyboardInterrupt: the trial at work is set aside and queued again, everything before is kept.
    """
    start = time.monotonic()
    while len(finished(study)) < settings.n_trials:
        if settings.max_seconds is not None and time.monotonic() - start > settings.max_seconds:
            break
        trial = study.ask()
        try:
            value = objective(trial)
        except optuna.TrialPruned:
            done = study.tell(trial, state=TrialState.PRUNED)
        except BaseException:
            study.tell(trial, state=TrialState.FAIL)
            raise
        else:
            done = study.tell(trial, value)
        on_trial(done)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def _without_password(url: str) -> str:
    try:
        return sqlalchemy.make_url(url).render_as_string(hide_password=True)
    except sqlalchemy.exc.ArgumentError:
        return url

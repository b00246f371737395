"""How does a search run, stop and go on? One Optuna study per name, in a journal file or any database.

The study is the truth: what is in it is done, whatever was killed. One process works on a study folder at a time (a lock
that the kernel releases with the process), so a trial found running is one that was killed; it is set aside and its choices
are queued again.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import filelock
import optuna
import sqlalchemy
from optuna.distributions import CategoricalDistribution
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from layerskip import SpeculativeConfig
from searches.app.checks import InputError, check_number, check_whole
from searches.app.interrupt import undisturbed
from searches.app.resume_log import drop_partial_line
from searches.app.time_ledger import TimeLedger, noted, spent_here
from searches.app.urls import without_password
from searches.space.search_space import SearchSpace
from searches.study.leaderboard import FINISHED, ranking
from searches.study.objective import Objective

FORESIGHT_SECONDS = "foresight_seconds"
BETWEEN = "between_seconds"
"""Of a trial: what Optuna, MLflow and Hydra took before it, from the end of the one before."""
SETTINGS = "settings"
_JOURNAL = b'{"op_code":'
_ID = "id"


@dataclass(frozen=True)
class StudySettings:
    """Which study, and how long.

    Args:
        name: None makes one of the target, the sampler, the seed and a digest of everything that changes results.
        n_trials: finished trials in the end, those of earlier runs of the same command included.
        storage: a database URL, or a journal file's path; None puts a journal file into the study's folder.
        max_seconds: no trial starts later than so many seconds after this run's first; None sets no limit.
        remeasure: the leader becomes a trial again when so many trials have passed since it last was one.
    """

    name: str | None = None
    n_trials: int = 32
    storage: str | None = None
    max_seconds: float | None = None
    remeasure: int = 8

    def __post_init__(self) -> None:
        check_whole("study.n_trials", self.n_trials)
        check_whole("study.remeasure", self.remeasure)
        if self.max_seconds is not None:
            check_number("study.max_seconds", self.max_seconds, or_zero=True)
        for field in ("name", "storage"):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, str(getattr(self, field)))  # yaml reads a name of digits as a number
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
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise InputError(f"study.name: another process is running the study in {folder}") from None
    try:
        yield
    finally:
        lock.release()


def open_journal(path: Path, alone: bool) -> BaseStorage:
    """A study's storage in a file.

    Args:
        path: of the file.
        alone: whether nobody else may be writing it, so that a lock was left by a program that was killed.

    Raises:
        InputError: it cannot be written there, or something else is.
    """
    path = path.resolve()  # Optuna's lock links to it, and a killed program leaves one, which has to lead here
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_journal(path)
        drop_partial_line(path)
        if alone:
            path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
        return JournalStorage(JournalFileBackend(str(path)))
    except (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise InputError(f"study.storage: cannot write {path}: {error.strerror}") from error


def _check_journal(path: Path) -> None:
    """Refuse a file that Optuna did not begin, before it is mended: another journal, or one that was killed at once."""
    if not path.exists():
        return
    with path.open("rb") as file:
        begun = file.read(len(_JOURNAL))
    if not (begun.startswith(_JOURNAL) or _JOURNAL.startswith(begun)):
        raise InputError(
            f"study.storage: {path} is no journal of Optuna's; a database is named by its address, sqlite:///..."
        )


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
        raise InputError(f"study.storage: cannot open {without_password(url)}: {_first_line(error)}") from error


def open_study(
    name: str,
    storage: BaseStorage,
    pruner: optuna.pruners.BasePruner,
    settings: Mapping[str, Any],
) -> optuna.Study:
    """Create a study, or resume it with the settings that it was created with.

    Args:
        settings: everything that changes results, as flat plain values.

    Raises:
        InputError: the study exists with other settings; the message names the first that differs.
    """
    study = optuna.create_study(study_name=name, storage=storage, pruner=pruner, direction="maximize", load_if_exists=True)
    before = study.user_attrs.get(SETTINGS)
    if _ID not in study.user_attrs:
        study.set_user_attr(_ID, uuid.uuid4().hex)
    if before is None:
        study.set_user_attr(SETTINGS, dict(settings))
        return study
    now = json.loads(json.dumps(dict(settings)))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise InputError(
                f"{key}: study {name} was made with {before.get(key)!r}, not {now.get(key)!r}; choose another study.name"
            )
    return study


def as_before(space: SearchSpace, study: optuna.Study) -> SearchSpace:
    """The space, with the kinds that the study's trials chose from: a name keeps its one list of choices.

    A version of this program that has learnt to make more of the same kinds, such as a cascade of others, goes on without.
    """
    for trial in study.get_trials(deepcopy=False):
        before = trial.distributions.get("kind")
        if isinstance(before, CategoricalDistribution) and tuple(before.choices) != space.arms:
            return replace(space, kinds=[str(kind) for kind in before.choices])
    return space


def prepare(study: optuna.Study) -> None:
    """Queue the choices of trials that were killed or interrupted again."""
    trials = study.get_trials(deepcopy=False)
    again = {trial.user_attrs["retry_of"] for trial in trials if "retry_of" in trial.user_attrs}
    for trial in trials:
        if trial.state in (TrialState.RUNNING, TrialState.FAIL) and trial.number not in again:
            # Queued before it is set aside: a kill in between queues it twice at worst, and loses nothing. A trial that
            # was killed while it still chose has only what it was told to choose.
            whole = "config" in trial.user_attrs
            choices = trial.params if whole else trial.system_attrs.get("fixed_params")
            if choices:
                study.enqueue_trial(choices, user_attrs={"retry_of": trial.number})
        if trial.state == TrialState.RUNNING:
            study.tell(trial.number, state=TrialState.FAIL)


def study_id(study: optuna.Study) -> str:
    """What tells a study from another of the same name that was deleted or lies elsewhere."""
    return str(study.user_attrs[_ID])


@contextlib.contextmanager
def foreseeing(study: optuna.Study, ledgers: Sequence[TimeLedger] = ()) -> Iterator[None]:
    """Count the seconds of a block, which no trial is about, as the search's, also where it is interrupted.

    Args:
        study: the search.
        ledgers: count what is made in the block for others, too.
    """
    start, before = time.monotonic(), spent_here(ledgers)
    try:
        yield
    finally:
        with undisturbed():
            spent = study.user_attrs.get(FORESIGHT_SECONDS, 0.0)
            counted = spent_here(ledgers) - before
            study.set_user_attr(FORESIGHT_SECONDS, spent + max(0.0, time.monotonic() - start - counted))


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that count."""
    return study.get_trials(deepcopy=False, states=FINISHED)


def run_trials(
    study: optuna.Study,
    objective: Objective,
    settings: StudySettings,
    on_trial: Callable[[FrozenTrial], None],
    starts: Sequence[SpeculativeConfig] = (),
    ledgers: Sequence[TimeLedger] = (),
) -> None:
    """Run trials until enough are finished.

    Args:
        on_trial: hears of every finished trial.
        starts: what is tried before the sampler is asked, unless it was before; one at a time, so that the leader's turn to
            be measured again comes between them.
        ledgers: count what is made in trials for others, too.

    Raises:
        KeyboardInterrupt: the trial at work is set aside, for :func:`prepare` to queue again; everything before is kept.
    """
    start = ended = time.monotonic()
    coming = iter(starts)
    tell = undisturbed()(study.tell)
    while len(finished(study)) < settings.n_trials:
        if settings.max_seconds is not None and time.monotonic() - start > settings.max_seconds:
            break
        with undisturbed():
            _challenge_leader(study, objective.space, settings.remeasure)
            while not _waiting(study) and (config := next(coming, None)) is not None:
                study.enqueue_trial(objective.space.params(config), skip_if_exists=True)
            trial = study.ask()
            begun = time.monotonic()
            trial.set_user_attr(BETWEEN, begun - ended)
        try:
            with noted(trial, ledgers):
                value = objective(trial)
        except optuna.TrialPruned:
            ended = time.monotonic()
            done = tell(trial, state=TrialState.PRUNED)
        except BaseException:
            with undisturbed():
                trial.set_user_attr("seconds", time.monotonic() - begun)  # spent all the same
                study.tell(trial, state=TrialState.FAIL)
            raise
        else:
            ended = time.monotonic()
            done = tell(trial, value)
        on_trial(done)


def _challenge_leader(study: optuna.Study, space: SearchSpace, every: int) -> None:
    """Queue the leader once more, so that it does not lead by luck: its replicates are pooled."""
    leaders = ranking(study)[:1]
    if not leaders or sum(trial.number >= leaders[0].last for trial in finished(study)) <= every:
        return
    params = space.params(leaders[0].config)
    if all(trial.system_attrs.get("fixed_params") != params for trial in _waiting(study)):
        study.enqueue_trial(params)


def _waiting(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.WAITING,))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""The Optuna study of a search, which can be stopped and resumed at any time.

The study is the truth: everything in it is done, whatever was killed. One process at a time works on a study. A trial that
is found running was therefore killed. It is marked as failed and its choices are queued again.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from layerskip import SpeculativeConfig
from searches.app.checks import InputError, check_number, check_whole
from searches.app.earlier_names import PREPARATION_SECONDS
from searches.app.interrupt import defer_interrupt
from searches.app.time_ledger import TimeLedger, record_shared_seconds, total_seconds_here
from searches.space.search_space import SearchSpace
from searches.study.leaderboard import FINISHED, ranking
from searches.study.objective import Objective
from searches.tracking.names import RETRY_OF

OVERHEAD_SECONDS = "between_seconds"
"""User attribute of a trial: seconds of Optuna, MLflow and Hydra since the end of the trial before."""
SETTINGS = "settings"
STUDY_ID = "id"
"""User attribute: the identifier of a study, which differs from that of another study of the same name."""


@dataclass(frozen=True)
class StudySettings:
    """The name, storage and length of a study.

    Args:
        name: None makes one from the target, the sampler, the seed and a digest of everything that changes results.
        n_trials: number of finished trials at the end, including those of earlier runs.
        storage: a database URL or the path of a journal file; None puts a journal file into the study's folder.
        max_seconds: no trial starts later than this after the start of the run; None sets no limit.
        remeasure: number of trials after which the leader is measured again.
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


def open_study(
    name: str, storage: BaseStorage, pruner: optuna.pruners.BasePruner, settings: Mapping[str, Any]
) -> optuna.Study:
    """Create a study, or resume it if its settings are the same.

    Args:
        name: of the study.
        storage: holds the study.
        pruner: stops trials early.
        settings: everything that changes results, as flat plain values.

    Raises:
        InputError: the study exists with other settings; the message names the first that differs.
    """
    study = optuna.create_study(study_name=name, storage=storage, pruner=pruner, direction="maximize", load_if_exists=True)
    before = study.user_attrs.get(SETTINGS)
    if STUDY_ID not in study.user_attrs:
        study.set_user_attr(STUDY_ID, uuid.uuid4().hex)
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


def with_stored_kinds(space: SearchSpace, study: optuna.Study) -> SearchSpace:
    """Return the space with the kinds that the study's earlier trials chose from.

    Optuna does not allow the choices of a parameter to change. A study of an earlier version, which had fewer kinds,
    therefore continues without the new ones.
    """
    for trial in study.get_trials(deepcopy=False):
        before = trial.distributions.get("kind")
        if isinstance(before, CategoricalDistribution) and tuple(before.choices) != space.available_kinds:
            return replace(space, kinds=[str(kind) for kind in before.choices])
    return space


def requeue_unfinished(study: optuna.Study) -> None:
    """Queue the choices of trials that were killed or interrupted again, and mark killed ones as failed."""
    trials = study.get_trials(deepcopy=False)
    again = {trial.user_attrs[RETRY_OF] for trial in trials if RETRY_OF in trial.user_attrs}
    for trial in trials:
        if trial.state in (TrialState.RUNNING, TrialState.FAIL) and trial.number not in again:
            # Queue first: a kill in between queues the trial twice, but loses nothing. A trial that was killed while it
            # was sampled has only its enqueued parameters.
            is_sampled = "config" in trial.user_attrs
            choices = trial.params if is_sampled else trial.system_attrs.get("fixed_params")
            if choices:
                study.enqueue_trial(choices, user_attrs={RETRY_OF: trial.number})
        if trial.state == TrialState.RUNNING:
            study.tell(trial.number, state=TrialState.FAIL)


@contextlib.contextmanager
def counting_preparation(study: optuna.Study, ledgers: Sequence[TimeLedger] = ()) -> Iterator[None]:
    """Add the seconds of a block outside trials to the search's, even if the block is interrupted.

    The seconds of shared artifacts, which the ledgers count, are left out.
    """
    start, before = time.monotonic(), total_seconds_here(ledgers)
    try:
        yield
    finally:
        with defer_interrupt():
            earlier = study.user_attrs.get(PREPARATION_SECONDS, 0.0)
            shared = total_seconds_here(ledgers) - before
            study.set_user_attr(PREPARATION_SECONDS, earlier + max(0.0, time.monotonic() - start - shared))


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials that were completed or pruned."""
    return study.get_trials(deepcopy=False, states=FINISHED)


def run_trials(
    study: optuna.Study,
    objective: Objective,
    settings: StudySettings,
    on_trial: Callable[[FrozenTrial], None],
    starts: Sequence[SpeculativeConfig] = (),
    ledgers: Sequence[TimeLedger] = (),
) -> None:
    """Run trials until the study has enough finished ones.

    Args:
        study: with its sampler and pruner.
        objective: measures a trial.
        settings: the number of trials and the time limit.
        on_trial: called after each finished trial.
        starts: configurations to try before the sampler is asked, unless they were tried. They are queued one at a time, so
            that measurements of the leader come in between.
        ledgers: count shared artifacts that trials make.

    Raises:
        KeyboardInterrupt: the running trial is marked as failed; :func:`requeue_unfinished` queues it again.
    """
    start = ended = time.monotonic()
    remaining = iter(starts)
    tell = defer_interrupt()(study.tell)
    while len(finished(study)) < settings.n_trials:
        if settings.max_seconds is not None and time.monotonic() - start > settings.max_seconds:
            break
        with defer_interrupt():
            _requeue_leader(study, objective.space, settings.remeasure)
            while not _waiting(study) and (config := next(remaining, None)) is not None:
                study.enqueue_trial(objective.space.params(config), skip_if_exists=True)
            trial = study.ask()
            started = time.monotonic()
            trial.set_user_attr(OVERHEAD_SECONDS, started - ended)
        try:
            with record_shared_seconds(trial, ledgers):
                value = objective(trial)
        except optuna.TrialPruned:
            ended = time.monotonic()
            done = tell(trial, state=TrialState.PRUNED)
        except BaseException:
            with defer_interrupt():
                trial.set_user_attr("seconds", time.monotonic() - started)
                study.tell(trial, state=TrialState.FAIL)
            raise
        else:
            ended = time.monotonic()
            done = tell(trial, value)
        on_trial(done)


def _requeue_leader(study: optuna.Study, space: SearchSpace, every: int) -> None:
    """Queue the leader again when due. Its replicates are pooled, so that it does not lead by luck."""
    leaders = ranking(study)[:1]
    if not leaders or sum(trial.number >= leaders[0].last for trial in finished(study)) <= every:
        return
    params = space.params(leaders[0].config)
    if all(trial.system_attrs.get("fixed_params") != params for trial in _waiting(study)):
        study.enqueue_trial(params)


def _waiting(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.WAITING,))

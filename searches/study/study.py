"""The Optuna study of a search, which can be stopped and resumed at any time.

The study is the truth: everything in it is done, whatever was killed. One process works on it, or any number of workers. A
trial that is found running without a worker that is alive was killed. It is marked as failed, and its choices are queued
again.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from layerskip import SpeculativeConfig
from searches.app.checks import InputError, check_number, check_whole
from searches.app.interrupt import defer_interrupt
from searches.connections import RetryingStorage
from searches.space.search_space import SearchSpace
from searches.study.leaderboard import FINISHED, leaderboard
from searches.study.objective import MEASURING_SECONDS, OVERHEAD_SECONDS, Objective
from searches.study.termination import why_not_another
from searches.tracking.names import RETRY_OF
from searches.workers.pool import ALONE, Workers

SETTINGS = "settings"
STUDY_ID = "id"
"""User attribute: the identifier of a study, which differs from that of another study of the same name."""
DUPLICATE_OF = "duplicate_of"
"""User attribute of a failed trial: the number of the running trial that measured the same configuration."""
_LOST = "lost"
"""User attribute of a trial: how often in a row the worker was lost that tried its choices before."""
_LOSSES = 4  # in a row, after which choices are not queued again: they may need more memory than the machine has
_REMEASURE = 8  # trials after which the leader is measured again
_MIN_TRIALS = 2  # however little time is left: the first may be plain decoding
_TURN = "next trial"  # the claim in which one worker at a time begins a trial
_DUPLICATES = 3  # in a row, after which a worker measures a configuration that another one measures


@dataclass(frozen=True)
class StudySettings:
    """The name, storage and length of a study.

    Args:
        name: None makes one from the target, the sampler, the seed and a digest of what changes results.
        n_trials: number of finished trials at the end, including those of earlier runs.
        storage: URL of a database, which several processes may use at the same time; None: SQLite in the study's folder.
        max_seconds: seconds of the whole search, interrupted runs included. Each stage ends at its share, and says what it
            left out; None sets no limit.
        expected_tokens: tokens that the export will decode: the trials end once another one is expected to take longer than
            it saves on them; None: no such end.
        workers: number of worker processes to start, ``auto`` for one per visible GPU; None for this process alone.
        threads: threads of the processor; None: chosen by a short measurement, unless ``OMP_NUM_THREADS`` sets them.
    """

    name: str | None = None
    n_trials: int = 32
    storage: str | None = None
    max_seconds: float | None = None
    expected_tokens: int | None = None
    workers: int | str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        check_whole("study.n_trials", self.n_trials)
        if self.max_seconds is not None:
            check_number("study.max_seconds", self.max_seconds, or_zero=True)
        for field in ("threads", "expected_tokens"):
            if getattr(self, field) is not None:
                check_whole(f"study.{field}", getattr(self, field))
        if self.workers not in (None, "auto"):
            check_whole("study.workers", self.workers)
        for field in ("name", "storage"):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, str(getattr(self, field)))  # yaml reads a name of digits as a number
        if self.name is not None and (not self.name or "/" in self.name or self.name in (".", "..")):
            raise InputError(f"study.name: {self.name!r} cannot be the name of a folder")
        if self.storage is not None and "://" not in self.storage:
            raise InputError(f"study.storage: {self.storage} is no URL of a database, such as sqlite:///study.db")


def open_study(
    name: str, storage: BaseStorage, pruner: optuna.pruners.BasePruner, settings: Mapping[str, Any]
) -> optuna.Study:
    """Create a study, or resume it if its settings, everything that changes results as flat plain values, are the same.

    Otherwise an :class:`InputError` names the first that differs.
    """
    study = optuna.create_study(study_name=name, storage=storage, pruner=pruner, direction="maximize", load_if_exists=True)
    before = study.user_attrs.get(SETTINGS)
    if STUDY_ID not in study.user_attrs:
        study.set_user_attr(STUDY_ID, uuid.uuid4().hex)
    if before is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            study.set_metric_names(["speedup"])  # for optuna-dashboard
        study.set_user_attr(SETTINGS, dict(settings))
        return study
    now = json.loads(json.dumps(dict(settings)))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise InputError(
                f"{key}: study {name} was made with {before.get(key)!r}, not {now.get(key)!r}; choose another study.name"
            )
    return study


def with_stored_methods(space: SearchSpace, study: optuna.Study) -> SearchSpace:
    """Return the space with the methods that the study's earlier trials chose from: Optuna lets no choices change."""
    for trial in study.get_trials(deepcopy=False):
        before = trial.distributions.get("method")
        if isinstance(before, CategoricalDistribution) and tuple(before.choices) != space.available_methods:
            return replace(space, methods=[str(method) for method in before.choices])
    return space


def finished(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=FINISHED)


def run_trials(
    study: optuna.Study,
    objective: Objective,
    settings: StudySettings,
    on_trial: Callable[[FrozenTrial], None] = lambda trial: None,
    starts: Sequence[SpeculativeConfig] = (),
    pool: Workers = ALONE,
    seconds_left: Callable[[], float] = lambda: math.inf,
) -> str:
    """Run trials until the study has enough finished ones; an interrupted one is marked as failed, and repeated later.

    Returns until when they ran, if that was not until there were enough; empty also if another worker found it.

    Args:
        starts: configurations to try before the sampler is asked, unless they were tried. They are queued one at a time, so
            that measurements of the leader come in between.
        seconds_left: returns the seconds in which further trials must end; none starts that would not, of any worker.
    """
    ended = time.monotonic()
    remaining, duplicates = iter(starts), 0

    def ask() -> optuna.Trial:
        _requeue_leader(study, objective.space)
        waiting = partial(study.get_trials, deepcopy=False, states=(TrialState.WAITING,))
        while not waiting() and (config := next(remaining, None)) is not None:
            study.enqueue_trial(objective.space.params(config), skip_if_exists=True)
        return study.ask()

    def run() -> bool:
        """Run one trial as soon as there is place for it; return False once the study is over."""
        nonlocal ended, duplicates
        trial: optuna.Trial | None = None
        state, value, started = TrialState.FAIL, None, time.monotonic()
        try:
            while trial is None:
                with pool.claim(_TURN), defer_interrupt():
                    if (places := _places(study, pool, settings.n_trials)) is None:
                        return False
                    if places:
                        trial = ask()
                        started = time.monotonic()
                        pool.sign(trial)
                        if isinstance(study._storage, RetryingStorage):
                            study._storage.join_changes(trial._trial_id)
                        trial.set_user_attr(OVERHEAD_SECONDS, started - ended)
                if trial is None:
                    pool.wait(lambda: _places(study, pool, settings.n_trials) != 0)
            is_refused = not pool.alone and duplicates < _DUPLICATES
            value = objective(trial, _refuse_duplicate) if is_refused else objective(trial)
            state = TrialState.COMPLETE
        except optuna.TrialPruned:
            state = TrialState.PRUNED
        except _Duplicate:
            pass
        except UpdateFinishedTrialError:  # this worker was presumed dead
            assert trial is not None
            print(f"trial {trial.number}: another worker repeats it, as this one was not seen for a while", flush=True)
        except BaseException:
            with defer_interrupt(), contextlib.suppress(UpdateFinishedTrialError):
                if trial is not None:
                    trial.set_user_attr("seconds", time.monotonic() - started)
                    finish_trial(study, trial, TrialState.FAIL)
            raise
        assert trial is not None  # an error before it existed was raised above
        ended = time.monotonic()
        done = finish_trial(study, trial, state, value)  # None if another worker has it now
        duplicates = duplicates + 1 if done is not None and DUPLICATE_OF in done.user_attrs else 0
        if done is not None and done.state in FINISHED:
            on_trial(done)
        return True

    while not (reason := _why_ended(study, settings, starts, seconds_left())) and run():
        pass
    if reason:
        with pool.claim(_TURN):
            pool.close()
    return reason


def _places(study: optuna.Study, pool: Workers, wanted: int) -> int | None:
    """Return how many trials may begin, after a repair of killed ones; None once there are enough, or the time is over."""
    trials = study.get_trials(deepcopy=False)
    missing = wanted - sum(trial.state in FINISHED for trial in trials)
    if pool.alone:
        return missing if missing > 0 else None
    if repair(study, pool, trials):
        return 0
    if missing <= 0 or pool.is_closed():
        return None
    return max(0, missing - sum(trial.state == TrialState.RUNNING for trial in trials))


def wait_for_trials(study: optuna.Study, pool: Workers) -> None:
    """Wait until no worker that is alive runs a trial; those of killed workers fail."""

    def is_idle() -> bool:
        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return not fail_orphans(study, pool.orphans(running)) and not running

    pool.wait(is_idle)


def _why_ended(study: optuna.Study, settings: StudySettings, starts: Sequence[SpeculativeConfig], seconds: float) -> str:
    """Return until when trials ran, if another would take longer than there is or than it saves; empty if it may begin."""
    trials = finished(study)
    measured = [trial.user_attrs[MEASURING_SECONDS] for trial in trials if MEASURING_SECONDS in trial.user_attrs]
    if len(trials) >= _MIN_TRIALS and seconds <= (statistics.fmean(measured) if measured else 0.0):
        return "in the budget"
    if settings.expected_tokens is None or len(trials) >= settings.n_trials:
        return ""
    return why_not_another(study, settings.expected_tokens, starts)


class _Duplicate(Exception):
    """The end of a trial whose configuration another worker measures."""


def _refuse_duplicate(trial: optuna.Trial, config: SpeculativeConfig) -> None:
    """Refuse a configuration that a trial with a lower number measures; of two at the same time both may go on."""
    for other in trial.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if other.number < trial.number and other.user_attrs.get("config") == config.to_dict():
            trial.set_user_attr(DUPLICATE_OF, other.number)
            trial.set_user_attr("reason", f"trial {other.number} measures the same configuration")
            raise _Duplicate


def _requeue_leader(study: optuna.Study, space: SearchSpace) -> None:
    """Queue the leader again when due. Its replicates are pooled, so that it does not lead by luck."""
    board = leaderboard(study)
    if board.leader is None or sum(trial.number >= board.leader.last for trial in board.trials) <= _REMEASURE:
        return
    params = space.params(board.leader.config)
    pending = study.get_trials(deepcopy=False, states=(TrialState.WAITING, TrialState.RUNNING))
    if all(trial.system_attrs.get("fixed_params") != params for trial in pending):
        study.enqueue_trial(params)


def requeue_unfinished(study: optuna.Study, pool: Workers = ALONE) -> None:
    """Mark killed trials as failed, and queue the choices of trials that were killed or interrupted again."""
    while repair(study, pool, study.get_trials(deepcopy=False)):
        pass


def repair(study: optuna.Study, pool: Workers, trials: Sequence[FrozenTrial]) -> bool:
    """Repair trials as :func:`requeue_unfinished` does; return whether there was anything to do."""
    if fail_orphans(study, pool.orphans(trials)):
        return True
    found = False
    again = {trial.user_attrs.get(RETRY_OF) for trial in trials}
    for trial in trials:
        if trial.state == TrialState.FAIL and trial.number not in again and DUPLICATE_OF not in trial.user_attrs:
            # A trial that was killed while it was sampled has only its enqueued parameters.
            choices = trial.params if "config" in trial.user_attrs else trial.system_attrs.get("fixed_params")
            is_interrupted = "seconds" in trial.user_attrs  # its worker was not lost
            lost = 0 if is_interrupted else 1 + trial.user_attrs.get(_LOST, 0)
            if choices and lost >= _LOSSES:
                line = f"trial {trial.number}: not repeated, as its worker was lost {_LOSSES} times in a row"
                pool.share(f"given up {trial.number}", partial(print, line, flush=True))
            elif choices:
                pool.share(f"retry {trial.number}", partial(_retry, study, trial.number, choices, lost))
                found = True
    return found


def fail_orphans(study: optuna.Study, orphans: Sequence[FrozenTrial]) -> bool:
    """Mark running trials whose workers are dead as failed; return whether there are any."""
    for trial in orphans:
        finish_trial(study, trial.number, TrialState.FAIL)
    return bool(orphans)


def _retry(study: optuna.Study, number: int, choices: dict[str, Any], lost: int) -> None:
    """Queue the choices of a failed trial, unless a worker that was killed then did it."""
    if all(trial.user_attrs.get(RETRY_OF) != number for trial in study.get_trials(deepcopy=False)):
        study.enqueue_trial(choices, user_attrs={RETRY_OF: number, _LOST: lost})


@defer_interrupt()
def finish_trial(
    study: optuna.Study, trial: optuna.Trial | int, state: TrialState, value: float | None = None
) -> FrozenTrial | None:
    """Finish a trial and return it; None if another worker finished it before."""
    try:
        return study.tell(trial, value, state)
    except (ValueError, UpdateFinishedTrialError):
        number = trial if isinstance(trial, int) else trial.number
        if study.get_trials(deepcopy=False)[number].state == TrialState.RUNNING:
            raise
        return None

"""The ends of trials that were not measured: killed and interrupted ones are queued again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from searches.app.interrupt import defer_interrupt
from searches.tracking.names import RETRY_OF
from searches.workers.alone import ALONE, Workers
from searches.workers.board import Look

DUPLICATE_OF = "duplicate_of"
"""User attribute of a failed trial: the number of the running trial that measured the same configuration."""
_LOSSES = 4  # in a row, after which choices are not queued again: they may need more memory than the machine has


def requeue_unfinished(study: optuna.Study, crew: Workers = ALONE) -> None:
    """Mark killed trials as failed, and queue the choices of trials that were killed or interrupted again."""
    while repair(study, crew, study.get_trials(deepcopy=False)):
        pass


def repair(study: optuna.Study, crew: Workers, trials: Sequence[FrozenTrial], look: Look | None = None) -> bool:
    """Repair some trials as :func:`requeue_unfinished` does; return whether there was anything to do.

    Args:
        study: the study.
        crew: its workers.
        trials: all its trials.
        look: of the crew, taken after the trials were read; None takes one if needed.
    """
    if fail_orphans(study, crew.orphans(trials, look)):
        return True
    found = False
    again = {trial.user_attrs.get(RETRY_OF) for trial in trials}
    for trial in trials:
        if trial.state == TrialState.FAIL and trial.number not in again and DUPLICATE_OF not in trial.user_attrs:
            # A trial that was killed while it was sampled has only its enqueued parameters.
            choices = trial.params if "config" in trial.user_attrs else trial.system_attrs.get("fixed_params")
            if choices and _losses(trials, trial) >= _LOSSES:
                crew.share(f"given up {trial.number}", partial(_print_given_up, trial.number))
            elif choices:
                crew.share(f"retry {trial.number}", partial(_retry, study, trial.number, choices))
                found = True
    return found


def fail_orphans(study: optuna.Study, orphans: Sequence[FrozenTrial]) -> bool:
    """Mark running trials whose workers are dead as failed; return whether there are any."""
    for trial in orphans:
        finish_trial(study, trial.number, TrialState.FAIL)
    return bool(orphans)


def _losses(trials: Sequence[FrozenTrial], last: FrozenTrial) -> int:
    """Return how often in a row the worker was lost that tried the choices of a failed trial; an interruption is no loss."""
    count, trial = 0, last
    while "seconds" not in trial.user_attrs:
        count += 1
        if RETRY_OF not in trial.user_attrs:
            break
        trial = trials[trial.user_attrs[RETRY_OF]]
    return count


def _print_given_up(number: int) -> None:
    print(f"trial {number}: not repeated, as its worker was lost {_LOSSES} times in a row", flush=True)


def _retry(study: optuna.Study, number: int, choices: dict[str, Any]) -> None:
    """Queue the choices of a failed trial, unless a worker that was killed then did it."""
    if all(trial.user_attrs.get(RETRY_OF) != number for trial in study.get_trials(deepcopy=False)):
        study.enqueue_trial(choices, user_attrs={RETRY_OF: number})


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

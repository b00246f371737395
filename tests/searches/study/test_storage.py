"""The storage of a study: its lock, and databases that are created by another worker, locked, full, damaged or refused."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import optuna
import pytest
import sqlalchemy
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Engine, event

from layerskip.measure.measurement import Sample
from searches.app.checks import InputError
from searches.connections import RetryingStorage, sqlite_file, sqlite_url, without_password
from searches.study import storage
from searches.study.storage import joined, open_database
from searches.study.study import StudySettings, run_trials
from searches.workers.pool import Workers
from tests.resources import fill
from tests.searches.known import Known, lookup, objective_of


def test_names_and_storages_that_cannot_be_are_refused() -> None:
    for name in ("", ".", "..", "a/b"):
        with pytest.raises(InputError, match="^study.name: .* cannot be the name of a folder$"):
            StudySettings(name=name)
    with pytest.raises(InputError, match=r"^study.storage: file.log is no URL of a database, such as "):
        StudySettings(storage="file.log")


def test_a_process_alone_locks_its_study_unless_it_has_workers(tmp_path: Path) -> None:
    def enter(worker: int | None = None) -> contextlib.AbstractContextManager[tuple[object, Workers]]:
        return joined("s", tmp_path, worker, "device", None)

    with enter() as (_, first):
        assert first.alone
        with pytest.raises(InputError, match="^study.name: another process is running the study in "):
            enter().__enter__()
    with enter(worker=0) as (_, pool), enter() as (_, other):
        assert not pool.alone and not other.alone
    with enter() as (_, last):
        assert not last.alone


def test_a_database_that_another_worker_creates_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = sqlalchemy.exc.OperationalError("CREATE", {}, sqlite3.OperationalError("table studies already exists"))
    url = f"sqlite:///{tmp_path}/study.db"
    monkeypatch.setattr(storage, "RDBStorage", Mock(side_effect=[exists, exists, RDBStorage(url)]))
    monkeypatch.setattr(storage.time, "sleep", lambda _: None)
    assert optuna.create_study(storage=open_database(url)).trials == []


def test_a_database_that_cannot_be_opened_is_refused_without_its_password() -> None:
    place = r"postgresql\+psycopg://me:\*\*\*@127.0.0.1:1/it"
    with pytest.raises(InputError, match=rf"^study\.storage: cannot open {place}: ") as raised:
        open_database("postgresql://me:secret@127.0.0.1:1/it")
    assert "secret" not in str(raised.value)


_HOLD = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def _held(file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Let another program hold an SQLite database until its standard input is closed."""
    command = [sys.executable, "-c", _HOLD, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"held\n"
        yield program


@pytest.mark.parametrize("is_new", [True, False])
def test_a_database_that_another_program_holds_is_waited_for(
    is_new: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storage, "_LOCK_SECONDS", 0.01)
    file = tmp_path / "q?x" / "study.db"
    file.parent.mkdir()
    url = sqlite_url(file)
    study = None if is_new else optuna.create_study(study_name="s", storage=open_database(url))
    with _held(file) as program:
        monkeypatch.setattr("searches.connections.time.sleep", lambda _: program.communicate())  # between two attempts
        study = study or optuna.create_study(study_name="s", storage=open_database(url))
        study.tell(study.ask(), 1.0)
    assert [trial.value for trial in study.trials] == [1.0]
    start = f"study.storage: {file}, which another program locked,"
    assert capsys.readouterr().out == f"{start} cannot be reached; trying again for 10 minutes\n{start} is back\n"
    assert [path.name for path in tmp_path.iterdir()] == ["q?x"]


def test_a_database_that_is_held_for_too_long_or_damaged_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_LOCK_SECONDS", 0.01)
    monkeypatch.setattr(storage, "_PATIENCE", 0.0)
    file = tmp_path / "study.db"
    study = optuna.create_study(study_name="s", storage=open_database(f"sqlite:///{file}"))
    with _held(file) as program:
        for use in (study.ask, lambda: open_database(f"sqlite:///{file}")):
            with pytest.raises(InputError, match=f"^study.storage: cannot .*{file}: .*database is locked"):
                use()
        program.communicate()
    file.write_bytes(b"SQLite format 3\0" + bytes(5000))
    for use in (study.ask, lambda: open_database(f"sqlite:///{file}")):
        with pytest.raises(InputError, match=f"^study.storage: cannot .*{file}: .*(malformed|not a database)"):
            use()


def test_a_database_on_a_full_disk_names_the_file(small_disk: Path) -> None:
    study = optuna.create_study(study_name="s", storage=open_database(f"sqlite:///{small_disk}/study.db"))
    fill(small_disk, 20_000)
    with pytest.raises(OSError, match="No space left on device") as refusal:
        study.set_user_attr("large", "x" * 1900 * 100)
    assert refusal.value.filename == str(small_disk / "study.db")
    (small_disk / "ballast").unlink()
    study.tell(study.ask(), 1.0)
    assert len(study.trials) == 1


def test_a_trial_is_few_transactions_and_its_choices_are_stored_before_it_is_measured(database: str) -> None:
    changes = list[bool]()  # of each transaction, whether there are any
    stored = list[FrozenTrial]()

    def begin(_: object) -> None:
        changes.append(False)

    def execute(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        changes[-1] |= statement.startswith(("INSERT", "UPDATE"))

    class Watched(Known):
        def compare(self, *arguments: Any) -> Iterator[dict[str, Sample]]:
            other = optuna.load_study(study_name="s", storage=database)
            stored.extend(other.get_trials(states=(TrialState.RUNNING,)))
            return super().compare(*arguments)

    study = optuna.create_study(study_name="s", storage=open_database(database), direction="maximize")
    objective = objective_of(Watched({lookup(4): 1.5}))
    listeners = (("begin", begin), ("before_cursor_execute", execute))
    for name, listener in listeners:
        event.listen(Engine, name, listener)
    run_trials(study, objective, StudySettings(n_trials=1), starts=[lookup(4)])
    for name, listener in listeners:
        event.remove(Engine, name, listener)
    assert sum(changes) == 5
    (running,), (finished,) = stored, study.trials
    assert (running.params, running.user_attrs["config"]) == (finished.params, lookup(4).to_dict())
    assert finished.user_attrs.keys() > running.user_attrs.keys() and len(finished.intermediate_values) == 5


def test_a_process_alone_reads_trials_again_after_each_of_its_changes(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    alone = open_database(url)
    assert isinstance(alone, RetryingStorage)
    alone.is_alone = True
    study = optuna.create_study(study_name="s", storage=alone)
    trial = study.ask()
    alone.join_changes(trial._trial_id)
    other = optuna.load_study(study_name="s", storage=open_database(url))
    for number in range(3):
        trial.set_user_attr("number", number)
        for every in (study, other):
            assert [each.user_attrs for each in every.get_trials()] == [{"number": number}]
    study.enqueue_trial({"x": 1.0})
    assert [each.state.name for each in study.trials] == ["RUNNING", "WAITING"]
    study.tell(trial, 1.0)
    assert [each.state.name for each in study.trials] == ["COMPLETE", "WAITING"]
    assert study.ask().number == 1
    assert [each.state.name for each in study.trials] == ["COMPLETE", "RUNNING"]


def test_changes_whose_commit_was_not_acknowledged_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that is there already is no reason to lose the changes beside it."""
    own = open_database(f"sqlite:///{tmp_path / 's.db'}")
    assert isinstance(own, RetryingStorage)
    study, transaction = optuna.create_study(study_name="s", storage=own), own._transaction
    commits = list[int]()

    @contextlib.contextmanager
    def unacknowledged() -> Iterator[None]:
        with transaction():
            yield
        commits.append(1)
        if len(commits) == 1:
            raise ConnectionError("the connection broke after the commit")

    monkeypatch.setattr(own, "_transaction", unacknowledged)
    trial = study.ask()
    own.join_changes(trial._trial_id)
    trial.set_user_attr("before", 1)
    trial.suggest_int("x", 0, 9)
    trial.set_user_attr("after", 2)
    study.tell(trial, 1.0)
    assert len(commits) > 2  # one of them twice
    (stored,) = optuna.load_study(study_name="s", storage=open_database(f"sqlite:///{tmp_path / 's.db'}")).trials
    assert (stored.user_attrs, list(stored.params)) == ({"before": 1, "after": 2}, ["x"])


@pytest.mark.parametrize("name", ["plain", "q?x=1", "50%20off", "a%3Fb%", "#é [x]'y,=+&:@"])
def test_the_url_of_a_file_names_it(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    url = sqlite_url(file)
    assert (sqlite_file(url), without_password(url)) == (file, url)
    with sqlalchemy.create_engine(url).begin() as connection:
        connection.exec_driver_sql("CREATE TABLE t (a)")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("url", ["http://host/x", "sqlite://", "sqlite:///:memory:", "mlruns", "postgresql://h:x/y"])
def test_other_urls_name_no_file(url: str) -> None:
    assert sqlite_file(url) is None
    assert without_password(url) == url


def test_a_password_is_hidden() -> None:
    assert without_password("postgresql://me:secret@host/it") == "postgresql://me:***@host/it"

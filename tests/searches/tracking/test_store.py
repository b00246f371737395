"""A tracking store that fails in the middle of a study is completed later; it opens after kills, and stays in its folder."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import sqlalchemy
from mlflow.tracking import MlflowClient
from sqlalchemy import event

from searches.app.checks import InputError
from searches.backends.engine_process import free_port
from searches.connections import sqlite_url
from searches.study import study
from searches.tracking import store
from searches.tracking.store import open_experiment
from searches.tracking.tracker import Tracker
from tests.resources import fill
from tests.searches.conftest import Launch
from tests.searches.programs import quick, runs, sqlite, tracked
from tests.searches.tracking.server import served
from tests.searches.tracking.studies import compared_study

pytestmark = pytest.mark.system

TRIALS = compared_study().trials
PARAMS = {f"field{number}": str(number) for number in range(105)}  # written in parts, as a store takes 100
LOST = "tracking.uri: cannot write to"
Fault = Callable[[Path], contextlib.AbstractContextManager[object]]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes MLflow's own waits short."""
    monkeypatch.setattr("searches.tracking.tracker.PATIENCE", 0.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    def hurry(_connection: object, _cursor: object, statement: str, parameters: object, *_: object) -> tuple[str, object]:
        return statement.replace("busy_timeout = 20000", "busy_timeout = 0"), parameters

    event.listen(sqlalchemy.Engine, "before_cursor_execute", hurry, retval=True)
    yield
    event.remove(sqlalchemy.Engine, "before_cursor_execute", hurry)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    connection = sqlite3.connect(folder / "mlflow.db", isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN EXCLUSIVE")
    yield
    connection.close()


@contextlib.contextmanager
def _without_experiment(folder: Path) -> Iterator[None]:
    client = MlflowClient(sqlite(folder))
    experiment = client.get_experiment_by_name("own")
    assert experiment is not None
    client.delete_experiment(experiment.experiment_id)
    yield
    client.restore_experiment(experiment.experiment_id)


@contextlib.contextmanager
def _full_artifacts(folder: Path) -> Iterator[None]:
    fill(folder / "mlartifacts", leave=0)
    yield
    (folder / "mlartifacts" / "ballast").unlink()


@contextlib.contextmanager
def _deleted_runs(folder: Path) -> Iterator[None]:
    for role in ("trial", "study"):
        MlflowClient(sqlite(folder)).delete_run(runs(sqlite(folder), role)[0].info.run_id)
    yield


FAULTS: dict[Fault, str | None] = {
    _locked: "database is locked",
    _without_experiment: "must be in the 'active' state",
    _full_artifacts: "No space left on device",
    _deleted_runs: None,
}
"""What happens to a store, and the reason that the line names; the store takes writes of deleted runs."""


def _open(folder: Path, uri: str | None = None) -> Tracker:
    tracker = Tracker(uri, folder, "own")
    tracker.open_study("a study", "1", PARAMS, {}, texts={"config.yaml": "seed: 0"})
    return tracker


def test_a_store_that_is_locked_at_the_start_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _open(tmp_path).finish()
    with contextlib.ExitStack() as lock:
        lock.enter_context(_locked(tmp_path))
        releasing = threading.Timer(3, lock.close)
        releasing.start()
        assert open_experiment(None, tmp_path, "own")[2] != "0"
        releasing.join()
    file = tmp_path / "mlflow.db"
    what = f"outputs: {file}, which another program locked,"
    assert capsys.readouterr().out.endswith(f"{what} cannot be reached; trying again for 10 minutes\n{what} is back\n")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that a study logs, in the folder of an empty store."""
    file = tracked(tmp_path) / "best.json"
    file.write_text("{}", encoding="utf-8")
    return file


def _finish(tracker: Tracker, file: Path) -> None:
    with tracker.closing():
        tracker.reconcile(TRIALS[:4])
        tracker.conclude("a winner", "It wins.", 1, {"trials": 4}, [(file, None), (file, "head")])


def _check_complete(uri: str) -> None:
    client, (study,), trials = MlflowClient(uri), *(runs(uri, role) for role in ("study", "trial"))
    assert (study.info.status, study.data.tags["winner"]) == ("FINISHED", "a winner")
    assert study.data.params == PARAMS
    assert {run.data.tags["mlflow.parentRunId"] for run in trials} == {study.info.run_id}
    assert {run.info.status for run in trials} == {"FINISHED"}
    assert sorted(int(run.data.tags["trial_number"]) for run in trials) == [0, 1, 2, 3]
    assert [run.data.tags["trial_number"] for run in trials if run.data.tags.get("best") == "true"] == ["1"]
    assert {artifact.path for run in trials for artifact in client.list_artifacts(run.info.run_id)} == {"prompts.json"}
    with pytest.MonkeyPatch.context() as patch:  # load_table asks for it
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        table = client.load_table(study.info.experiment_id, "prompts.json", [trials[0].info.run_id])
    stored = TRIALS[int(trials[0].data.tags["trial_number"])].user_attrs["table"]
    assert table.to_dict("list") == {name: list(column) for name, column in stored.items()}
    paths = {artifact.path for artifact in client.list_artifacts(study.info.run_id)}
    assert paths == {"config.yaml", "best.json", "head"}


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_fails_is_completed_when_it_is_back_or_at_the_next_start(
    fault: Fault,
    is_restarted: bool,
    file: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if fault is _full_artifacts:
        (tmp_path / "mlartifacts").symlink_to(request.getfixturevalue("small_disk"))
    tracker = _open(tmp_path)
    tracker.record(TRIALS[0])
    tracker.record(TRIALS[1])
    with fault(tmp_path):
        tracker.log({"loss": 2.0}, step=7)
        tracker.record(TRIALS[2])
        tracker.record(TRIALS[3])
        _finish(tracker, file)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(LOST)]
    assert len(printed) == (FAULTS[fault] is not None)
    assert all(str(FAULTS[fault]) in line for line in printed)
    _finish(_open(tmp_path) if is_restarted else tracker, file)
    _check_complete(sqlite(tmp_path))


def test_a_store_that_hangs_costs_little_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock, attempts = [0.0], [0]

    def advance(seconds: float) -> None:
        clock[0] += seconds

    def hang() -> None:
        advance(20.0)
        attempts[0] += 1
        raise ConnectionResetError

    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=advance))
    box = store.Outbox("http://me:secret@there")
    box.put("a write", hang)
    for _ in range(1000):
        box.send()
        advance(1.0)
    assert attempts[0] == 5  # a tenth of the seconds
    box.send(patience=10.0)  # of an outage that has lasted longer
    assert attempts[0] == 6
    box.send(patience=2000.0)
    assert clock[0] >= 2000.0
    (printed,) = capsys.readouterr().out.splitlines()
    assert "***" in printed and "secret" not in printed


def test_a_server_that_fails_and_is_killed_is_completed_when_it_is_back(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port, artifacts = free_port(), tmp_path / "served"
    with served(tmp_path, port) as url:
        tracker = _open(tmp_path, url)
        tracker.record(TRIALS[0])
        artifacts.rename(tmp_path / "away")
        artifacts.touch()  # artifacts cannot be written: the server answers 500
        tracker.record(TRIALS[1])
        assert len(runs(sqlite(tmp_path), "trial")) == 2
    tracker.record(TRIALS[2])
    tracker.log({"loss": 2.0}, step=7)
    tracker.record(TRIALS[3])
    _finish(tracker, file)
    (printed,) = capsys.readouterr().out.splitlines()
    assert printed.startswith(f"{LOST} {url}: ") and "500" in printed
    artifacts.unlink()
    (tmp_path / "away").rename(artifacts)
    with served(tmp_path, port):
        _finish(_open(tmp_path, url), file)
        _check_complete(url)


def test_a_study_ends_without_its_store_and_the_same_command_completes_it(
    tiny_folder: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs, stack = tracked(tmp_path / "outputs"), contextlib.ExitStack()
    small = ("study.name=it", "study.n_trials=2", "space.methods=[none,prompt_lookup]", "worker=0")
    overrides = quick(tiny_folder, outputs, "tracking.experiment=own", *small)
    run_trials, faults = study.run_trials, list[Any]()

    def fails(*arguments: Any) -> None:
        if not faults:  # before the first comparison's trials
            faults.append(stack.enter_context(_locked(outputs)))
        run_trials(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("searches.study.sweep.run_trials", fails)
        first = launch("layerskip", *overrides, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert (outputs / "it" / "best.json").exists()
    assert first.stdout.count("tracking.uri: ") == 1
    stack.close()
    again = launch("layerskip", *overrides, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    (found,), client = runs(sqlite(outputs), "study"), MlflowClient(sqlite(outputs))
    assert (found.info.status, "winner" in found.data.tags) == ("FINISHED", True)
    assert [run.data.tags["mlflow.parentRunId"] for run in runs(sqlite(outputs), "trial")] == [found.info.run_id] * 2
    names = {artifact.path for artifact in client.list_artifacts(found.info.run_id)}
    assert {"config.yaml", "report.md", "report.png", "report.html", "best.json"} <= names


_KILLED = """
import os, pathlib, signal, sys
from sqlalchemy import Engine, event
from searches.tracking.store import open_experiment

@event.listens_for(Engine, "after_cursor_execute")
def kill(connection, cursor, statement, *_):
    if "ADD COLUMN step" in statement:  # of one of MLflow's migrations; SQLite keeps the column
        os.kill(os.getpid(), signal.SIGKILL)

open_experiment(None, pathlib.Path(sys.argv[1]), "e")
"""


def test_a_process_that_is_killed_while_it_creates_the_store_leaves_none_that_does_not_open(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], timeout=120).returncode == -9
    assert len(list(tmp_path.glob("mlflow.db.*.new"))) == 1
    client, uri, experiment = open_experiment(None, tmp_path, "e")
    assert client.get_experiment(experiment).name == "e"
    assert uri == f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert not list(tmp_path.glob("*.new*"))
    (tmp_path / "mlflow.db").rename(tmp_path / "other.db")
    named = f"sqlite:///{tmp_path / 'other.db'}"
    assert open_experiment(named, tmp_path, "e") == (ANY, named, experiment)  # an existing store stays


def test_everything_is_written_into_the_folder_also_after_it_was_moved_or_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where MLflow writes by default
    folder = tracked(tmp_path / "start")
    for name in ("a%3Fb?c#d [é]'y,=+", "50%20off", "plain"):
        folder = folder.rename(tmp_path / name)
        client, uri, experiment = open_experiment(None, folder, "e")
        assert uri == sqlite_url(folder / "mlflow.db")
        client.log_text(client.create_run(experiment).info.run_id, "new", f"{len(name)}.txt")
    runs = client.search_runs([experiment])
    assert sorted(len(client.list_artifacts(run.info.run_id)) for run in runs) == [1, 1, 1]
    assert len(list((tmp_path / "plain" / "mlartifacts").rglob("*.txt"))) == 3
    named = f"sqlite:///{tracked(tmp_path / 'named')}/mlflow.db"
    client, _, experiment = open_experiment(named, tmp_path / "outputs", "e")
    client.log_text(client.create_run(experiment).info.run_id, "new", "a.txt")
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "named"}


@pytest.mark.parametrize("is_named", [False, True])
def test_a_store_that_does_not_open_is_blamed_on_the_field_that_chose_it(is_named: bool, tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("no database " * 100, encoding="utf-8")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    field = "tracking.uri" if is_named else "outputs"
    with pytest.raises(InputError, match=f"^{field}: cannot open {uri}: file is not a database$"):
        open_experiment(uri if is_named else None, tmp_path, "e")

"""The MLflow store opens after a process was killed while it created it, and stays in its folder, whatever its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest

from searches.app.checks import InputError
from searches.connections import sqlite_url
from searches.tracking.store import open_experiment
from tests.searches.programs import tracked

pytestmark = pytest.mark.system

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
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_artifacts_of_a_named_store_are_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    client, _, experiment = open_experiment(f"sqlite:///{tracked(tmp_path / 'store')}/mlflow.db", tmp_path / "outputs", "e")
    client.log_text(client.create_run(experiment).info.run_id, "new", "a.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("is_named", [False, True])
def test_a_store_that_does_not_open_is_blamed_on_the_field_that_chose_it(is_named: bool, tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("no database " * 100, encoding="utf-8")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    field = "tracking.uri" if is_named else "outputs"
    with pytest.raises(InputError, match=f"^{field}: cannot open {uri}: file is not a database$"):
        open_experiment(uri if is_named else None, tmp_path, "e")

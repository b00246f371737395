"""The supervisor of several workers in this process: what it starts, shows and passes on, with scripts as workers."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest

from searches.app.interrupt import INTERRUPTED
from searches.study import supervisor
from searches.study.storage import open_database
from searches.study.study import StudySettings
from searches.study.supervisor import LocalWorkers, Place
from tests.searches.conftest import Launch
from tests.searches.tracking.studies import compared_study
from tests.searches.workers.members import wait_until

pytestmark = pytest.mark.system

_LOG = "machine/0 works on study some"
_GET_PARENT_DEATH_SIGNAL, _SET_PARENT_DEATH_SIGNAL = 2, 1  # of linux/prctl.h
_WAITING = "touch began; while [ ! -e end ]; do sleep 0.02; done"


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Restores what a worker does with Ctrl-C."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a database, in a folder in which workers are scripts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "worker"))
    monkeypatch.setattr(supervisor, "_POLL_SECONDS", 0.02)
    return f"sqlite:///{tmp_path}/study.db"


def _worker(script: str) -> None:
    """Write the script of all workers; its last argument is in ``$own``."""
    Path("worker").write_text(f'#!/bin/sh\nfor own in "$@"; do :; done\n{script}\n', encoding="utf-8")
    Path("worker").chmod(0o755)


def test_the_report_of_the_workers_is_shown_at_the_end(database: str, tmp_path: Path, launch: Launch) -> None:
    _worker(f'echo "$@" > "$own"; echo "{_LOG}"; mkdir -p outputs/some; echo "the report" > outputs/some/report.md')
    overrides = ("study.workers=1", "worker=7", "study.n_trials=3", f"study.storage={database}")
    done = launch("layerskip", *overrides, "target.device=cpu", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "the report\n\n"), done.stderr
    command = ["-m", "searches.layerskip", "study.n_trials=3", f"study.storage={database}", "target.device=cpu", "worker=0"]
    assert [each.lstrip("+") for each in Path("worker=0").read_text(encoding="utf-8").split()] == command


def test_the_code_of_the_first_worker_that_failed_is_passed_on(
    database: str, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "places", lambda *_: [Place({}), Place({})])
    _worker(f'test $own = worker=0 && echo "{_LOG}"; echo "error: of $own"; test $own = worker=0 && exit 5; exit 6')
    open_database(database)
    done = launch("layerskip", "study.workers=2", f"study.storage={database}", cwd=tmp_path)
    assert done.returncode == 5
    for number, code in enumerate((5, 6)):
        assert f"worker {number}: error: of worker={number}\nworker {number}: ended with exit code {code}\n" in done.stderr
    assert sorted(path.name for path in Path("outputs/some/workers").iterdir()) == ["0.log", "1.log"]
    assert os.listdir("outputs") == ["some"]


@pytest.mark.parametrize("name", ["TERM", "HUP", "INT"])
def test_a_supervisor_that_is_interrupted_interrupts_its_workers(
    name: str, database: str, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = signal.Signals[f"SIG{name}"]

    def snapshot(_: float) -> None:
        wait_until(Path("began").exists)
        signal.raise_signal(number)

    _worker(f"trap 'touch interrupted; exit {INTERRUPTED}' {name}; {_WAITING}")
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(sleep=snapshot))
    done = launch("layerskip", "study.workers=1", "target.device=cpu", f"study.storage={database}", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (128 + number, "interrupted; the same command continues from here\n")
    assert Path("interrupted").exists()


def test_a_second_ctrl_c_kills_workers_that_do_not_end(database: str, tmp_path: Path) -> None:
    _worker(f"trap '' INT; {_WAITING}")
    workers = LocalWorkers([], [Place({})], tmp_path / "outputs", StudySettings(storage=database))
    (process,) = workers._processes
    wait, waits = process.wait, []

    def interrupted() -> int:
        waits.append(process.poll())
        if len(waits) == 1:
            raise KeyboardInterrupt
        return wait()

    process.wait = interrupted  # type: ignore[method-assign, assignment]
    wait_until(Path("began").exists)
    with pytest.raises(KeyboardInterrupt):
        workers.stop()
    assert workers.codes() == [128 + signal.SIGKILL]
    assert waits[0] is None  # it ran when Ctrl-C came again


def test_the_progress_of_the_study_is_shown(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            if "leader" in text:
                Path("end").touch()
            return super().write(text)

    study = optuna.create_study(study_name="some", storage=open_database(database), direction="maximize")
    study.add_trials(compared_study().trials)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    _worker(f'echo "{_LOG}"; {_WAITING}')
    workers = LocalWorkers([], [Place({})], tmp_path / "outputs", StudySettings(storage=database, n_trials=9))
    workers.watch()
    assert workers.codes() == [0]
    assert "1 workers, 7 of 9 trials" in terminal.getvalue()  # six finished, and one that was not run
    assert " 1.90 x (" in terminal.getvalue()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent has ended")
def test_a_worker_is_interrupted_with_its_supervisor_and_keeps_to_its_cores() -> None:
    cores, told, library = os.sched_getaffinity(0), ctypes.c_int(), ctypes.CDLL(None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        supervisor._prepare_worker([min(cores)], os.getppid())
        assert os.sched_getaffinity(0) == {min(cores)}
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        library.prctl(_GET_PARENT_DEATH_SIGNAL, ctypes.byref(told), 0, 0, 0)
        assert told.value == signal.SIGINT
    finally:
        library.prctl(_SET_PARENT_DEATH_SIGNAL, 0, 0, 0, 0)
        os.sched_setaffinity(0, cores)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent has ended")
def test_a_worker_whose_supervisor_has_ended_before_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(supervisor, "_LIBRARY", SimpleNamespace(prctl=lambda *_: 0))
    supervisor._prepare_worker(None, os.getpid())
    assert codes == [INTERRUPTED]

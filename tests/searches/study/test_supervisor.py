"""The supervisor of several workers in this process: what it starts, prints and passes on, with scripts as workers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from searches.app.checks import InputError
from searches.app.interrupt import INTERRUPTED
from searches.study import supervisor
from searches.study.supervisor import LocalWorkers, Place, places
from tests.searches.conftest import Launch
from tests.searches.workers.members import started, wait_until

pytestmark = pytest.mark.system

_WAITING = "touch began; while [ ! -e end ]; do sleep 0.02; done"


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Writes the script that all workers are; its last argument is in ``$own``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "worker"))
    monkeypatch.setattr(supervisor, "_POLL_SECONDS", 0.02)
    (tmp_path / "worker").touch(0o755)
    return lambda script: Path("worker").write_text(f'#!/bin/sh\nfor own in "$@"; do :; done\n{script}\n', encoding="utf-8")


def test_workers_run_the_same_command(worker: Callable[[str], int], tmp_path: Path, launch: Launch) -> None:
    worker('echo "$@" > "$own"')
    done = launch("layerskip", "study.workers=1", "worker=7", "study.n_trials=3", "target.device=cpu", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    command = ["-m", "searches.layerskip", "study.n_trials=3", "target.device=cpu", "worker=0"]
    assert [each.lstrip("+") for each in Path("worker=0").read_text(encoding="utf-8").split()] == command


def test_the_code_of_the_first_worker_that_failed_is_passed_on(
    worker: Callable[[str], int],
    tmp_path: Path,
    launch: Launch,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(supervisor, "places", lambda *_: [Place({}), Place({})])
    worker('echo "error: of $own"; test $own = worker=0 && exit 5; exit 6')
    done = launch("layerskip", "study.workers=2", cwd=tmp_path)
    assert done.returncode == 5
    assert capfd.readouterr().out == "error: of worker=0\n"
    assert "worker 1: error: of worker=1\nworker 1: ended with exit code 6\n" in done.stderr
    assert "worker 0: ended with exit code 5\n" in done.stderr


@pytest.mark.parametrize("name", ["TERM", "HUP", "INT"])
def test_a_supervisor_that_is_interrupted_interrupts_its_workers(
    name: str, worker: Callable[[str], int], tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = signal.Signals[f"SIG{name}"]

    def snapshot(_: float) -> None:
        wait_until(Path("began").exists)
        signal.raise_signal(number)

    worker(f"trap 'touch interrupted; exit {INTERRUPTED}' {name}; {_WAITING}")
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(sleep=snapshot))
    done = launch("layerskip", "study.workers=1", "target.device=cpu", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (128 + number, "interrupted; the same command continues from here\n")
    assert Path("interrupted").exists()


def test_a_second_ctrl_c_kills_workers_that_do_not_end(worker: Callable[[str], int], tmp_path: Path) -> None:
    worker(f"trap '' INT; {_WAITING}")
    workers = LocalWorkers([], [Place({})], tmp_path / "outputs")
    wait_until(Path("began").exists)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers._processes[0], "wait", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            workers.stop()
    assert workers.wait() == [128 + signal.SIGKILL]


def test_workers_share_the_cores_or_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5, 6})
    assert places(2, "cpu") == [Place({"OMP_NUM_THREADS": "2"}, (0, 1)), Place({"OMP_NUM_THREADS": "2"}, (4, 5))]
    assert len(places("auto", "cpu")) == 1
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-1a,7")
    assert [place.variables["CUDA_VISIBLE_DEVICES"] for place in places("auto", "auto")] == ["5", "GPU-1a", "7"]
    with pytest.raises(InputError, match=r"study.workers: 4 is more than the 3 visible GPUs"):
        places(4, "auto")


_STAND_IN = """
import os, sys, time, pathlib
folder = pathlib.Path(sys.argv[0]).parent
try:
    (folder / f"began {sys.argv[-1]}").write_text(str(len(os.sched_getaffinity(0))))
    time.sleep(60)
except KeyboardInterrupt:
    (folder / f"interrupted {sys.argv[-1]}").touch()
"""


def _supervise(folder: Path) -> None:
    """Start two programs that stand for workers, like a script that runs in the background of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.executable = str(folder / "python")
    LocalWorkers([], [Place({}), Place({}, (min(os.sched_getaffinity(0)),))], folder / "outputs").wait()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent has ended")
def test_workers_are_interrupted_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f"#!{sys.executable}\n{_STAND_IN}")
    (tmp_path / "python").chmod(0o755)
    with started(_supervise, tmp_path) as process:
        wait_until(lambda: len(list(tmp_path.glob("began *"))) == 2)
        wait_until(lambda: (tmp_path / "began worker=1").read_text() == "1")  # it keeps to its core
        process.kill()
        process.join()  # it may wait for the disk
        wait_until(lambda: len(list(tmp_path.glob("interrupted *"))) == 2)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent has ended")
def test_a_worker_whose_supervisor_was_killed_before_it_began_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(supervisor, "_LIBRARY", SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for parent in (os.getppid(), os.getpid()):
        supervisor._prepare_worker(None, parent)
    assert codes == [INTERRUPTED]

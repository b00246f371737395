"""Real studies of a tiny model by several processes, and the processes that are started together."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import optuna
import pytest
import torch

from searches.app.checks import InputError
from searches.study.storage import storage_url
from searches.study.study import StudySettings, preparation_seconds
from searches.study.supervisor import LocalWorkers, Place, places
from searches.tracking.names import DEVICE, WORKER
from searches.workers.board import of_kind
from searches.workers.slots import FINISHED
from tests.searches.conftest import Launch
from tests.searches.programs import Fork, quick, runs, sqlite, tracked
from tests.searches.workers.members import started, wait_until

pytestmark = pytest.mark.system

TRIALS = 8


@pytest.fixture(scope="module")
def together(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return the outputs of a study of two workers, and what they printed."""
    outputs = tracked(tmp_path_factory.mktemp("together") / "outputs")
    overrides = quick(
        tiny_folder, outputs, f"study.n_trials={TRIALS}", "study.name=one", "space.methods=[none,prompt_lookup,layer_skip]"
    )
    with (
        Fork("searches.layerskip", *overrides, "worker=0", cwd=outputs.parent) as first,
        Fork("searches.layerskip", *overrides, "worker=1", cwd=outputs.parent) as second,
    ):
        ended = [process.wait() for process in (first, second)]
    assert [process.returncode for process in ended] == [0, 0], [process.stderr for process in ended]
    return outputs, [process.stdout for process in ended]


def _study(outputs: Path) -> optuna.Study:
    return optuna.load_study(study_name="one", storage=f"sqlite:///{outputs}/one/study.db")


def test_two_workers_finish_a_study_together(together: tuple[Path, list[str]]) -> None:
    outputs, printed = together
    trials = _study(outputs).trials
    done = [trial for trial in trials if trial.state in FINISHED]
    assert len(done) == TRIALS
    assert len({trial.user_attrs[WORKER] for trial in done}) == 2
    assert len({trial.user_attrs[DEVICE] for trial in done}) == 1
    assert sorted(int(run.data.tags["trial_number"]) for run in runs(sqlite(outputs), "trial")) == [t.number for t in done]
    assert [run.info.status for run in runs(sqlite(outputs), "study")] == ["FINISHED"]
    assert {run.info.status for run in runs(sqlite(outputs), "trial")} == {"FINISHED"}
    best = json.loads((outputs / "one" / "best.json").read_text(encoding="utf-8"))
    assert best["search"]["trials"] == TRIALS
    assert sum("Finalists" in text for text in printed) == 1  # one of them measured and published
    assert preparation_seconds(_study(outputs)) > 0
    assert _study(outputs).metric_names == ["speedup"]


def test_what_precedes_the_trials_is_made_once(together: tuple[Path, list[str]]) -> None:
    outputs, _ = together
    rows = optuna.load_study(study_name="one-workers", storage=f"sqlite:///{outputs}/one/study.db").trials
    values = [row.user_attrs["name"] for row in of_kind(rows, "claim") if "parts" in row.user_attrs]
    assert len(values) == len(set(values))
    assert {"device"} <= set(values)
    assert sum(name.startswith("profile ") for name in values) == 1
    makers = {row.user_attrs["worker"] for row in of_kind(rows, "claim") if "parts" in row.user_attrs}
    assert len(makers) == 2  # both scanned
    assert not list((outputs / "one").glob("scans-*/*.jsonl"))


def test_another_type_of_device_is_refused_or_has_a_study_of_its_own(
    together: tuple[Path, list[str]], tiny_folder: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs, _ = together
    monkeypatch.setattr("searches.study.sweep.device_type", lambda _: "another GPU")
    overrides = quick(tiny_folder, outputs, "study.name=one", "space.methods=[none,prompt_lookup]", "worker=2")
    refused = launch("layerskip", *overrides, "study.n_trials=1", cwd=outputs.parent)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: study.devices: study one measures on ")
    assert "another GPU" in refused.stderr
    mixed = launch("layerskip", *overrides, "study.n_trials=1", "study.devices=mixed", cwd=outputs.parent)
    assert mixed.returncode == 0, mixed.stderr
    assert (outputs / "one" / "another-GPU" / "best.json").exists()
    assert json.loads((outputs / "one" / "best.json").read_text(encoding="utf-8"))["search"]["trials"] == TRIALS


def test_workers_share_the_cores_or_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5, 6})
    assert places(2, "cpu") == [Place({"OMP_NUM_THREADS": "2"}, (0, 1)), Place({"OMP_NUM_THREADS": "2"}, (4, 5))]
    assert len(places("auto", "cpu")) == 1
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-1a,7")
    assert [place.variables["CUDA_VISIBLE_DEVICES"] for place in places("auto", "auto")] == ["5", "GPU-1a", "7"]
    with pytest.raises(InputError, match=r"study.workers: 4 is more than the 3 visible GPUs"):
        places(4, "auto")
    with pytest.raises(InputError, match=r"study.storage: file.log is a journal file"):
        storage_url(StudySettings(storage="file.log"), Path())


_STAND_IN = """
import sys, time, pathlib
folder = pathlib.Path(sys.argv[0]).parent
try:
    (folder / f"began {sys.argv[-1]}").touch()
    time.sleep(60)
except KeyboardInterrupt:
    (folder / f"interrupted {sys.argv[-1]}").touch()
"""


def _supervise(folder: Path) -> None:
    """Start two programs that stand for workers, like a script that runs in the background of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.executable = str(folder / "python")
    settings = StudySettings(storage=f"sqlite:///{folder}/study.db", n_trials=1)
    LocalWorkers([], [Place({}), Place({}, (min(os.sched_getaffinity(0)),))], folder / "outputs", settings).watch()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent has ended")
def test_workers_are_interrupted_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f"#!{sys.executable}\n{_STAND_IN}")
    (tmp_path / "python").chmod(0o755)
    with started(_supervise, tmp_path) as supervisor:
        wait_until(lambda: len(list(tmp_path.glob("began *"))) == 2)
        supervisor.kill()
        wait_until(lambda: len(list(tmp_path.glob("interrupted *"))) == 2)

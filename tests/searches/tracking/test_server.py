"""A study tracked on a real MLflow server."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.searches.programs import environment, execute, quick, runs, sqlite, tracked


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Start an MLflow server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
         "--backend-store-uri", sqlite(tracked(tmp_path)), "--artifacts-destination", str(tmp_path / "artifacts")],
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    for _ in range(240):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
            break
        except OSError:
            time.sleep(0.25)
    else:
        pytest.fail("the MLflow server did not start")
    yield url
    subprocess.run(["pkill", "-TERM", "-s", str(process.pid)], check=False)
    process.wait(timeout=30)


def test_a_study_is_tracked_on_a_server(server: str, tiny_folder: Path, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    overrides = quick(tiny_folder, outputs, f"tracking.uri={server}", "study.n_trials=2", "study.name=remote")
    done = execute("layerskip", *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (outputs / "mlflow.db").exists()
    assert len(runs(server, "trial")) == 2
    assert runs(server, "study")[0].info.status == "FINISHED"
    assert any((tmp_path / "artifacts").rglob("best.json"))

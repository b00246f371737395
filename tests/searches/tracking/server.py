"""A real MLflow server for tests."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import requests

from searches.backends.engine_process import EngineProcess
from tests.searches.programs import sqlite


@contextlib.contextmanager
def served(folder: Path, port: int) -> Iterator[str]:
    """Serve the store of a folder by MLflow, with artifacts in ``served``, and yield the URL; the end kills the server."""
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", sqlite(folder), "--artifacts-destination", str(folder / "served")]
    alone = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # no processes for jobs that runs do not need

    def ready() -> bool:
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"{url}/health", timeout=1).ok
        return False

    server = EngineProcess(command, alone, "MLflow", grace_seconds=0.0)
    server.wait_until(ready, 120)
    try:
        yield url
    finally:
        server.stop()

"""The stores of outages: an MLflow server that stops and starts again, and a disk that is full."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from searches.backends.engine_process import free_port


class TrackingServer:
    """An MLflow server with a store of its own.

    Args:
        store: URI of the SQLite store.
        artifacts: folder of the artifacts.
    """

    def __init__(self, store: str, artifacts: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
        self._command += ["--workers", "1", "--backend-store-uri", store, "--artifacts-destination", str(artifacts)]
        self._start()

    def restart(self, seconds: float) -> None:
        """Stop the server, wait, and start it again."""
        self.close()
        time.sleep(seconds)
        self._start()

    def close(self) -> None:
        """Stop the server and the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _start(self) -> None:
        alone = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # no processes for jobs that runs do not need
        self._process = subprocess.Popen(
            self._command, env=alone, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        end = time.monotonic() + 120
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=1).close()
                return
            except OSError:
                time.sleep(0.25)
        self.close()
        raise RuntimeError("the MLflow server did not start")


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """Mount a small file system of its own on a folder; skip the test if this user may not."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def fill(folder: Path) -> None:
    """Write a file until the disk of a folder is full."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**20))

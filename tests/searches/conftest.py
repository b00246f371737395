"""Fixtures that run programs in this process, which saves the import time of a new one."""

from __future__ import annotations

import contextlib
import io
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from searches.predict import preparation
from tests.searches.programs import run_as_main

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def launch() -> Launch:
    """Runs a program to its end in this process, like :func:`tests.searches.programs.execute` in a new one."""

    def run(program: str, *overrides: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(cwd)
            patch.setattr(sys, "argv", [program, *overrides])
            patch.setattr(preparation, "PROFILE_REPEATS", 2)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
                run_as_main(f"searches.{program}")
        assert isinstance(end.value.code, int)
        return subprocess.CompletedProcess([program, *overrides], end.value.code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def database(tmp_path: Path) -> Iterator[str]:
    """The URL of a new SQLite database for processes of a test, in memory if possible: on a busy disk, changes take long."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield f"sqlite:///{folder}/study.db"


@pytest.fixture
def a_second_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every measured row take one second, by a clock that is read twice for each."""
    ticks = itertools.count()
    monkeypatch.setattr("searches.study.bench.monotonic", lambda: float(next(ticks)))

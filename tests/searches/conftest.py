"""Programs in this process, which saves the seconds that a process takes to import everything."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.searches.programs import run_as_main

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Launch:
    """Runs a program to its end, as :func:`tests.searches.programs.execute` does with a process of its own."""

    def run(program: str, *overrides: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", [program, *overrides])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run_as_main(f"searches.{program}")
        assert isinstance(end.value.code, int)
        said = capsys.readouterr()
        return subprocess.CompletedProcess([program, *overrides], end.value.code, said.out, said.err)

    return run


@pytest.fixture
def a_second_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows take no time here, as nothing is decoded: a clock that is looked at twice for each."""
    ticks = itertools.count()
    monkeypatch.setattr("searches.study.bench.monotonic", lambda: float(next(ticks)))

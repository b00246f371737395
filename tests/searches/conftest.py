"""Programs in this process, which saves the seconds that a process takes to import everything."""

from __future__ import annotations

import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Launch:
    """Runs a program to its end, as :func:`tests.searches.programs.execute` does with a process of its own."""

    def run(program: str, *overrides: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", [program, *overrides])
        capsys.readouterr()
        with warnings.catch_warnings():
            # Tests have imported parts of the module already, which the program's own run of it does not look at.
            warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
            with pytest.raises(SystemExit) as end:
                runpy.run_module(f"searches.{program}", run_name="__main__")
        assert isinstance(end.value.code, int)
        said = capsys.readouterr()
        return subprocess.CompletedProcess([program, *overrides], end.value.code, said.out, said.err)

    return run

"""Jobs of a multirun: one that fails ends no other one, and the command ends with the worst exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from omegaconf import DictConfig

from searches.app.application import run, worst
from searches.app.checks import InputError

pytestmark = pytest.mark.system


def _refuse() -> NoReturn:
    raise InputError("study.n_trials: 0|1 is less than 2")


def _crash() -> NoReturn:
    raise ArithmeticError("a defect")


def _end(
    tasks: Sequence[Callable[[], object]], folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str
) -> tuple[int | str | None, list[int]]:
    """Run a job for each task; return the exit code of the command and the seeds of the jobs that began."""
    begun: list[int] = []

    def task(config: DictConfig) -> None:
        begun.append(config.seed)
        tasks[config.seed]()

    seeds = f"seed={','.join(map(str, range(len(tasks))))}"
    monkeypatch.setattr(sys, "argv", ["layerskip", "-m", seeds, f"outputs={folder}", *more])
    with pytest.raises(SystemExit) as end:
        run("layerskip", task)
    return end.value.code, begun


def test_other_jobs_run_and_a_table_lists_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [_refuse, lambda: sys.exit(3), _crash, lambda: None, lambda: sys.exit(4)]
    assert _end(tasks, tmp_path, monkeypatch) == (1, [0, 1, 2, 3, 4])
    shown, errors = capsys.readouterr()
    assert errors.startswith("error: study.n_trials: 0|1 is less than 2\n")
    assert errors.count("Traceback") == 1
    rows = [line.partition(" outputs=")[0] for line in shown.splitlines()]
    assert rows[-5:] == [f"| {code} | seed={seed}" for seed, code in ((0, 2), (1, 3), (2, 1), (3, 0), (4, 4))]


def test_a_choice_that_does_not_exist_is_refused_before_any_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _end([lambda: None, lambda: None], tmp_path, monkeypatch, "sampler=tpe,nonsense") == (2, [])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: In 'layerskip': Could not find 'sampler/nonsense'")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_jobs(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [_crash, lambda: signal.raise_signal(number), lambda: None]
    assert _end(tasks, tmp_path, monkeypatch) == (128 + number, [0, 1])
    shown, errors = capsys.readouterr()
    assert errors.splitlines()[-1] == "interrupted; the same command continues from here"
    assert shown.splitlines()[-1].startswith(f"| {128 + number} | seed=1 ")


@pytest.mark.parametrize(
    ("codes", "last"), [([0], 0), ([0, 3], 3), ([3, 4], 4), ([4, 2], 2), ([2, 1, 4], 1), ([1, 130, 143, 0], 143)]
)
def test_the_worst_code(codes: list[int], last: int) -> None:
    assert worst(codes) == last

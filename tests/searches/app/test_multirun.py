"""Jobs of a multirun, also of launchers: one that fails ends no other one, and the command ends with the worst exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, run_job
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from searches.app.application import run, worst
from searches.app.checks import InputError
from searches.app.interrupt import Terminated

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


SEEN: list[Any] = []
"""What the jobs of the launcher below were given."""


class PickledLauncher(Launcher):
    """Runs jobs one after the other, on copies of everything that a launcher sends to another machine and back."""

    def setup(self, *, hydra_context: HydraContext, task_function: Callable[..., Any], config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run a job for each list of overrides; return what Hydra made of them."""
        returned = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = number
            context, task, config, _ = _copy((self.hydra_context, self.task_function, config, Singleton.get_state()))
            returned.append(_copy(run_job(task, config, "hydra.sweep.dir", "hydra.sweep.subdir", context)))
        return returned


PickledLauncher.__module__ = "hydra_plugins.pickled"  # Hydra takes plugins of this package alone


def _copy(value: Any) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(value))


def _launch(task: Callable[[DictConfig], Any], *overrides: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """Run two workers of a program; return its exit code."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    SEEN.clear()
    monkeypatch.setitem(sys.modules, "hydra_plugins.pickled", sys.modules[__name__])
    ConfigStore.instance().store("pickled", {"_target_": "hydra_plugins.pickled.PickledLauncher"}, "hydra/launcher")
    Plugins.instance().register(PickledLauncher)
    command = ["layerskip", "-m", "hydra/launcher=pickled", "worker=range(0,2)", *overrides]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        run("layerskip", task)
    return end.value.code


def _see(config: DictConfig) -> None:
    SEEN.append((config.worker, config.study.n_trials))


def _fail_as_worker_1(config: DictConfig) -> None:
    _see(config)
    if config.worker == 1:
        raise [ArithmeticError("two\nlines"), KeyboardInterrupt(), Terminated(15)][config.seed]


@pytest.mark.parametrize(
    ("own", "code", "line"),
    [
        (["outputs={}/file"], 2, "error: outputs: {}/file is not a folder"),
        (["outputs={}", "seed=0"], 1, "lines"),
        (["outputs={}", "seed=1"], 130, "interrupted; the same command continues from here"),
        (["outputs={}", "seed=2"], 143, "interrupted; the same command continues from here"),
    ],
)
def test_the_command_ends_with_the_code_and_the_line_of_its_job(
    own: list[str], code: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    given = [override.format(tmp_path) for override in (*own, "hydra.sweep.dir={}/jobs", "study.n_trials=7")]
    assert _launch(_fail_as_worker_1, *given, monkeypatch=monkeypatch) == code
    stderr = capsys.readouterr().err
    assert stderr.splitlines()[-1] == line.format(tmp_path)
    # A defect has its traceback where the job ran.
    assert stderr.count("Traceback") == (code == 1)
    assert SEEN in ([], [(0, 7), (1, 7)])
    assert "Error executing job with overrides" in stderr  # says which job


def test_a_launcher_without_its_cluster_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    overrides = ("hydra/launcher=submitit_slurm", f"outputs={tmp_path}")
    assert _launch(_see, *overrides, monkeypatch=monkeypatch) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: hydra.launcher: ")
    assert SEEN == []

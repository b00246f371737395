"""Jobs that a launcher of Hydra runs elsewhere end the command that started them as they would end by themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, run_job
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from searches.app.application import run
from searches.app.interrupt import Terminated

pytestmark = pytest.mark.system

pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
SEEN: list[Any] = []
"""What the jobs of the launcher below were given or said."""


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
    ("more", "code", "line"),
    [
        (["outputs={}/file"], 2, "error: outputs: {}/file is not a folder"),
        (["outputs={}", "seed=0"], 1, "lines"),
        (["outputs={}", "seed=1"], 130, "interrupted; the same command continues from here"),
        (["outputs={}", "seed=2"], 143, "interrupted; the same command continues from here"),
    ],
)
def test_the_command_ends_with_the_code_and_the_line_of_its_job(
    more: list[str],
    code: int,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    given = [override.format(tmp_path) for override in (*more, "hydra.sweep.dir={}/jobs", "study.n_trials=7")]
    assert _launch(_fail_as_worker_1, *given, monkeypatch=monkeypatch) == code
    stdout, stderr = capsys.readouterr()
    assert stderr.splitlines()[-1] == line.format(tmp_path)
    assert stdout.splitlines()[-1] == f"| worker=1 | {code} | {line.format(tmp_path)} |"
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

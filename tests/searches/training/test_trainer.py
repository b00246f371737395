"""Checkpoints of a training, divergence, and limits of time."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from searches.app.checks import InputError
from searches.tracking.tracker import Tracker
from searches.training.trainer import Trainer, TrainingCheckpoint, check_training_folder
from tests.searches.programs import tracked

CONFIG = {"texts_per_step": 1, "learning_rate": 0.5, "steps": 10**6, "max_seconds": None, "seed": 0, "save_seconds": 10}


class _Idle(Trainer):
    """Trainer that never does a step."""

    def initialise(self) -> None:
        pass

    def loss(self, indices: list[int]) -> torch.Tensor:
        raise NotImplementedError

    def evaluate(self) -> list[float]:
        raise NotImplementedError


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    config = OmegaConf.create(CONFIG)
    _Idle(config, torch.nn.Linear(1, 1), 1, TrainingCheckpoint(tmp_path / "training.pt", "who", "asked"))
    check_training_folder(tmp_path, "asked")
    with pytest.raises(InputError, match="^head: .* holds another training"):
        check_training_folder(tmp_path, "asked otherwise")
    with pytest.raises(InputError, match="^head: .* holds another training, or one of other texts"):
        _Idle(config, torch.nn.Linear(1, 1), 1, TrainingCheckpoint(tmp_path / "training.pt", "other texts", "asked"))


@pytest.mark.parametrize(
    "content",
    [b"", b"no archive", b"PK\x03\x04 half of one", pickle.dumps(Path, protocol=2)],
    ids=["empty", "text", "half", "code"],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    checkpoint = TrainingCheckpoint(tmp_path / "training.pt", "who", "asked")
    checkpoint.path.write_bytes(content)
    with pytest.raises(InputError, match=r"^head: .*training\.pt cannot be read \([^\n]*\); delete it to train again$"):
        check_training_folder(tmp_path, "asked")
    config = OmegaConf.create(CONFIG)
    with pytest.raises(InputError, match=r"^head: .*training\.pt cannot be read"):
        _Idle(config, torch.nn.Linear(1, 1), 1, checkpoint)
    assert checkpoint.path.read_bytes() == content


class _Diverging(_Idle):
    """Trainer with a loss of 1, then another one."""

    then: float

    def loss(self, indices: list[int]) -> torch.Tensor:
        weight = self.module.get_parameter("weight").sum()
        return weight * 0 + 1 if not self.step else weight * self.then


@pytest.mark.parametrize("then", [float("nan"), float("inf"), 1e38])  # the last has a gradient whose norm is infinite
def test_a_step_that_diverges_changes_nothing(then: float, tmp_path: Path) -> None:
    module = torch.nn.Linear(100, 1)
    trainer = _Diverging(OmegaConf.create(CONFIG), module, 1, TrainingCheckpoint(tmp_path / "training.pt", "who"))
    trainer.then = then
    trainer.train_step()
    trainer.save()
    before, kept = module.weight.clone(), trainer.checkpoint.path.read_bytes()
    with pytest.raises(InputError, match="^learning_rate: the loss is .* at step 1; 0.5 "):
        trainer.train_step()
    assert torch.equal(module.weight, before)
    assert trainer.checkpoint.path.read_bytes() == kept


class _Timed(Trainer):
    """Trainer with its own clock: initialisation takes 5 seconds, a step 2, evaluation 3."""

    clock = 0.0

    def initialise(self) -> None:
        _Timed.clock += 5.0

    def loss(self, indices: list[int]) -> torch.Tensor:
        _Timed.clock += 2.0
        return torch.tensor(0.0)

    def evaluate(self) -> list[float]:
        _Timed.clock += 3.0
        return [0.5]


@pytest.mark.parametrize("seconds", [56, 57, 58, 59, 60])
def test_the_limit_of_seconds_includes_evaluation(seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last step and its evaluation may exceed the limit, and a further run does nothing."""
    _Timed.clock = 0.0
    monkeypatch.setattr("searches.training.trainer.now", lambda _: _Timed.clock)
    monkeypatch.setattr("searches.training.trainer.time", SimpleNamespace(monotonic=lambda: _Timed.clock))
    tracker = Tracker(None, tracked(tmp_path), "trainings")
    tracker.open_study("timed", "who", {}, {}, role="training")
    steps = []
    with tracker.closing():
        for _ in range(2):
            module, checkpoint = torch.nn.Linear(1, 1), TrainingCheckpoint(tmp_path / "training.pt", "who", "asked")
            trainer = _Timed(OmegaConf.create(CONFIG | {"max_seconds": seconds}), module, 3, checkpoint)
            trainer.train(tracker)
            steps.append(trainer.step)
    assert seconds <= _Timed.clock < seconds + 2 + 3
    assert steps[0] == steps[1] > 10

"""What a training has kept: whose it is, and what is no training's."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from searches.app.checks import InputError
from searches.tracking.tracker import Tracker
from searches.training.learner import Diverged, Learner, TrainingFile, refuse_another


class _Still(Learner):
    """Learns nothing."""

    def begin(self) -> None:
        pass

    def loss(self, places: list[int]) -> torch.Tensor:
        raise NotImplementedError

    def judge(self) -> list[float]:
        raise NotImplementedError


def test_a_training_that_was_interrupted_before_its_first_step_is_known(tmp_path: Path) -> None:
    config = OmegaConf.create({"texts_per_step": 1, "learning_rate": 0.1})
    _Still(config, torch.nn.Linear(1, 1), 1, TrainingFile(tmp_path / "training.pt", "who", "asked"))
    refuse_another(tmp_path, "asked")
    with pytest.raises(InputError, match="^head: .* holds another training"):
        refuse_another(tmp_path, "asked otherwise")


@pytest.mark.parametrize(
    "content",
    [b"", b"no archive", b"PK\x03\x04 half of one", pickle.dumps(Path, protocol=2)],
    ids=["empty", "text", "half", "code"],
)
def test_a_damaged_training_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    file = TrainingFile(tmp_path / "training.pt", "who", "asked")
    file.path.write_bytes(content)
    with pytest.raises(
        InputError, match=r"^head: .*training\.pt cannot be read \([^\n]*\); without it training begins anew$"
    ):
        refuse_another(tmp_path, "asked")
    config = OmegaConf.create({"texts_per_step": 1, "learning_rate": 0.1})
    with pytest.raises(InputError, match=r"^head: .*training\.pt cannot be read"):
        _Still(config, torch.nn.Linear(1, 1), 1, file)
    assert file.path.read_bytes() == content


class _Diverging(_Still):
    """Its loss is 1, then something else."""

    then: float

    def loss(self, places: list[int]) -> torch.Tensor:
        weight = self.module.get_parameter("weight").sum()
        return weight * 0 + 1 if not self.step else weight * self.then


@pytest.mark.parametrize("then", [float("nan"), float("inf"), 1e38])  # the last has a gradient whose norm is infinite
def test_what_is_no_number_is_not_learnt_and_not_kept(then: float, tmp_path: Path) -> None:
    config = OmegaConf.create({"texts_per_step": 1, "learning_rate": 0.5, "steps": 9, "max_seconds": None, "seed": 0})
    module = torch.nn.Linear(100, 1)
    learner = _Diverging(config, module, 1, TrainingFile(tmp_path / "training.pt", "who"))
    learner.then = then
    learner.learn()
    learner.save()
    before, kept = module.weight.clone(), learner.file.path.read_bytes()
    with pytest.raises(Diverged, match="^learning_rate: the loss is .* at step 1, .* 0.5 "):
        learner.learn()
    assert torch.equal(module.weight, before)
    assert learner.file.path.read_bytes() == kept


class _Timed(Learner):
    """On a clock of its own: beginning takes 5 seconds, a step 2, judging 3."""

    clock = 0.0

    def begin(self) -> None:
        _Timed.clock += 5.0

    def loss(self, places: list[int]) -> torch.Tensor:
        _Timed.clock += 2.0
        return torch.tensor(0.0)

    def judge(self) -> list[float]:
        _Timed.clock += 3.0
        return [0.5]


@pytest.mark.parametrize("seconds", [56, 57, 58, 59, 60])
def test_the_time_of_a_training_is_that_of_judging_it_too(
    seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last step and what is thought of it come on top; a further run adds nothing."""
    _Timed.clock = 0.0
    monkeypatch.setattr("searches.training.learner.now", lambda _: _Timed.clock)
    monkeypatch.setattr("searches.training.learner.time", SimpleNamespace(monotonic=lambda: _Timed.clock))
    fields = {
        "texts_per_step": 1,
        "learning_rate": 0.1,
        "seed": 0,
        "steps": 10**6,
        "max_seconds": seconds,
        "save_seconds": 10,
    }
    tracker = Tracker(f"sqlite:///{tmp_path}/mlflow.db", tmp_path, "trainings")
    tracker.open_study("timed", "who", {}, {}, role="training")
    steps = []
    with tracker.closing():
        for _ in range(2):
            module, file = torch.nn.Linear(1, 1), TrainingFile(tmp_path / "training.pt", "who", "asked")
            learner = _Timed(OmegaConf.create(fields), module, 3, file)
            learner.learn_all(tracker)
            steps.append(learner.step)
    assert seconds <= _Timed.clock < seconds + 2 + 3
    assert steps[0] == steps[1] > 10

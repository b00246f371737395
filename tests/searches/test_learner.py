"""What a training has kept: whose it is, and what is no training's."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from searches.application import InputError
from searches.learner import Learner, TrainingFile, refuse_another


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

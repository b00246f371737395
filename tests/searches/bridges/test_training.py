"""The memory of a training step of bridges, as torch's profiler counts it, and warm starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from layerskip.bridges.bridge import Bridges, BridgeShape
from layerskip.mask import SkipMask
from layerskip.models.target import Target
from layerskip.texts.continuations import Continuation
from searches.app.checks import InputError
from searches.bridges.training import BridgeTexts, BridgeTrainer
from searches.training.trainer import TrainingCheckpoint
from tests.allocations import peak_bytes
from tests.drafters.bridges import bridge_shape, calibration
from tests.exhaustive import representative
from tests.families import build

ANSWER = 24
CONFIG = {"learning_rate": 0.001, "steps": 9, "max_seconds": None, "seed": 0}


class _Unfitted(BridgeTrainer):
    """Trainer that begins from the initial parameters."""

    def initialise(self) -> None:
        pass


def _trainer(
    folder: Path, target: Target, continuations: list[Continuation], training_bytes: int, unroll: int, *made: object
) -> BridgeTrainer:
    config = OmegaConf.create(CONFIG | {"unroll": unroll, "texts_per_step": 8, "training_bytes": training_bytes})
    shape = BridgeShape.of(target, SkipMask.parse("layers:3-9", target.layers), *(made or ("linear", 4, 0)))
    texts = BridgeTexts(target, continuations, None, None, None)  # type: ignore[arg-type]
    return _Unfitted(config, shape, texts, TrainingCheckpoint(folder / f"{training_bytes}.pt", "one"))


def _bytes_of_one_text(refused: pytest.ExceptionInfo[InputError]) -> int:
    return int(str(refused.value).split()[-1])


def _step_bytes(trainer: BridgeTrainer, places: list[int]) -> int:
    """Return the bytes that a step with some texts needs."""

    def step() -> None:
        trainer.module.zero_grad()
        trainer.loss(places).backward()  # type: ignore[no-untyped-call]

    return peak_bytes(step)


def test_the_budget_includes_attention_probabilities_of_packed_texts(tmp_path: Path) -> None:
    """The family keeps all of them: rows have columns of all texts, though masked."""
    target = Target(build("gemma2", num_hidden_layers=16, num_attention_heads=8, num_key_value_heads=8))
    continuations = [Continuation(str(number), "own", tuple(range(3, 43)), tuple([5, 6] * 20), 40) for number in range(12)]
    with pytest.raises(InputError, match="not even one text") as few:
        _trainer(tmp_path, target, continuations, 1000, 1)
    budget = 8 * _bytes_of_one_text(few)
    trainer = _trainer(tmp_path, target, continuations, budget, 1)
    assert 1 < trainer.texts_per_step < 8
    assert 0.4 * budget < _step_bytes(trainer, list(range(trainer.texts_per_step))) <= budget


@pytest.mark.parametrize(
    ("family", "vocabulary", "dtype", "unroll", "budget"),
    representative(
        [
            ("llama", 64, torch.float32, 2, 10_000_000),
            ("gemma3_text", 1600, torch.bfloat16, 1, 10_000_000),  # fifty times the hidden size: large logits
        ],
        [("llama", 1600, torch.float32, 1, 13_000_000), ("gemma3_text", 1600, torch.bfloat16, 2, 14_000_000)],
    ),
)
def test_a_step_keeps_its_budget_for_long_prompts_and_large_vocabularies(
    family: str, vocabulary: int, dtype: torch.dtype, unroll: int, budget: int, tmp_path: Path
) -> None:
    """Most answers have the largest length: prompts decide which texts need most memory. The longest has a short answer."""
    target = Target(build(family, num_hidden_layers=16, vocab_size=vocabulary).to(dtype))
    generator = torch.Generator().manual_seed(0)

    def continuation(number: int, prompt: int, answer: int) -> Continuation:
        ids = torch.randint(3, target.vocabulary, (prompt + answer,), generator=generator).tolist()
        return Continuation(str(number), "own", tuple(ids[:prompt]), tuple(ids[prompt:]), answer)

    continuations = [continuation(number, prompt, ANSWER) for number, prompt in enumerate([4] * 8 + [300] * 8)]
    continuations.append(continuation(99, 320, 4))
    trainer = _trainer(tmp_path, target, continuations, budget, unroll)
    assert 1 < trainer.texts_per_step < 8
    dearest = list(range(8, 8 + trainer.texts_per_step))
    assert 0.5 * budget < _step_bytes(trainer, dearest) <= budget


def test_the_budget_includes_gradients_and_moments(tmp_path: Path) -> None:
    """With wide bridges and short texts, gradients and the moments of the optimiser need most of the memory."""
    target = Target(build("llama", num_hidden_layers=16, hidden_size=128))
    continuations = [Continuation(str(number), "own", (3, 4, 5), (6, 7, 8, 9), 4) for number in range(8)]
    with pytest.raises(InputError, match=r"^training_bytes: 1000 hold not even one text, which takes \d+$") as few:
        _trainer(tmp_path, target, continuations, 1000, 2, "mlp", 0, 2048)
    budget = _bytes_of_one_text(few)
    trainer = _trainer(tmp_path, target, continuations, budget, 2, "mlp", 0, 2048)
    assert trainer.texts_per_step == 1

    def steps() -> None:
        trainer.train_step()
        trainer.train_step()

    # The budget includes the closed form and the warm start, which are allocated before any step.
    numbers = trainer.bridges.shape.parameter_count
    assert 12 * numbers < peak_bytes(steps) <= budget - 8 * numbers


@pytest.mark.parametrize("spoilt", ["closed form", "warm start"])
def test_training_begins_from_a_warm_start_only_if_its_loss_is_lower(spoilt: str, tmp_path: Path) -> None:
    known = calibration("llama")
    shape = bridge_shape(known.target, "layers:1-2")
    good = known.fit(shape)
    harmed = Bridges(shape)
    harmed.load_state_dict(good.bridges.state_dict())
    with torch.no_grad():
        harmed.of(harmed.mask.gaps[0]).bias += 3.0
    warm_start = Bridges(bridge_shape(known.target, "layers:1"))
    warm_start.warm_start(good.bridges if spoilt == "closed form" else harmed)
    fit = replace(good, bridges=harmed if spoilt == "closed form" else good.bridges)
    texts = BridgeTexts(known.target, list(known.continuations), None, lambda: SimpleNamespace(fit=lambda _: fit), None)
    config = OmegaConf.create(CONFIG | {"unroll": 1, "texts_per_step": 4, "training_bytes": 2**24})
    trainer = BridgeTrainer(config, shape, texts, TrainingCheckpoint(tmp_path / "training.pt", "one"), warm_start=warm_start)
    found, wanted = trainer.bridges.state_dict(), good.bridges.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)

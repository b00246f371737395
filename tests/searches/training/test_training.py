"""Checkpoints of a training, divergence and limits of time; training texts and draft vocabularies."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from layerskip import PromptError, PromptSet, load_target
from layerskip.decoding.sampling import Sampling
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.heads.feature_store import FeatureStore, TextFeatures
from layerskip.models.trained_module import save_trained
from layerskip.texts.training_texts import TrainingText
from searches.app.checks import InputError
from searches.tracking.tracker import Tracker
from searches.training.texts import drafted_tokens, opening_texts, write_texts
from searches.training.trainer import HeadTrainer, check_training_folder
from tests.drafters.members import tiny
from tests.searches.programs import tracked
from tests.tiny import save_tiny

CONFIG = {"texts_per_step": 1, "learning_rate": 0.5, "steps": 10**6, "seed": 0, "save_seconds": 10, "unroll": 2}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "training.pt"


def _trainer(file: Path, identity: str = "who", kind: type[HeadTrainer] = HeadTrainer, **changes: object) -> HeadTrainer:
    store = FeatureStore(file.parent / "features", tiny("llama"))
    store.fill([TrainingText((3, 4, 5, 6, 7), 2), TrainingText((5, 4, 3, 8), 1)], 10**6)
    head, config = EagleHead(EagleShape.of(store.target)), OmegaConf.create(CONFIG | {"max_seconds": None} | changes)
    return kind(config, head, store, [], file.parent, identity, "asked")


def test_a_checkpoint_of_another_training_is_refused(file: Path) -> None:
    trainer = _trainer(file)
    check_training_folder(file.parent, "asked")
    with pytest.raises(InputError, match="^head: .* holds another training"):
        check_training_folder(file.parent, "asked otherwise")
    with pytest.raises(InputError, match="^head: .* holds another training, or one of other texts"):
        _trainer(file, "other texts")
    save_trained(file.parent / "h", trainer.head.shape.to_dict(), trainer.head.weights(), trainer.store.target, {})
    with pytest.raises(InputError, match="^head: .* holds a head that this program did not train"):
        check_training_folder(file.parent / "h", "asked")


@pytest.mark.parametrize(
    "content",
    [b"", b"no archive", b"PK\x03\x04 half of one", pickle.dumps(Path, protocol=2)],
    ids=["empty", "text", "half", "code"],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"^head: .*training\.pt cannot be read \([^\n]*\); delete it to train again$"):
        check_training_folder(file.parent, "asked")
    with pytest.raises(InputError, match=r"^head: .*training\.pt cannot be read"):
        _trainer(file)
    assert file.read_bytes() == content


@pytest.mark.parametrize("then", [float("nan"), float("inf"), 1e38])  # the last has a gradient whose norm is infinite
def test_a_step_that_diverges_changes_nothing(then: float, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer(file)
    trainer.train_step()
    trainer.save()
    before, kept = trainer.head.fc.weight.clone(), file.read_bytes()
    monkeypatch.setattr(trainer, "loss", lambda _: trainer.head.fc.weight.sum() * then)
    with pytest.raises(InputError, match="^learning_rate: the loss is .* at step 1; 0.5 "):
        trainer.train_step()
    assert torch.equal(trainer.head.fc.weight, before)
    assert file.read_bytes() == kept


class _Timed(HeadTrainer):
    """Trainer with its own clock: initialisation takes 5 seconds, a step 2, evaluation 3."""

    clock = 0.0

    def initialise(self) -> None:
        _Timed.clock += 5.0

    def loss(self, indices: list[int]) -> torch.Tensor:
        _Timed.clock += 2.0
        return self.head.fc.weight.sum()

    def acceptance(self, texts: Iterable[TextFeatures]) -> list[float]:
        _Timed.clock += 3.0
        return [0.5]


@pytest.mark.parametrize("seconds", [57, 60])
def test_the_limit_of_seconds_includes_evaluation(seconds: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last step and its evaluation may exceed the limit, and a further run does nothing."""
    _Timed.clock = 0.0
    monkeypatch.setattr("searches.training.trainer.now", lambda _: _Timed.clock)
    monkeypatch.setattr("searches.training.trainer.time", SimpleNamespace(monotonic=lambda: _Timed.clock))
    tracker = Tracker(None, tracked(file.parent), "trainings")
    tracker.open_study("timed", "who", {}, {}, role="training")
    steps = []
    with tracker.closing():
        for _ in range(2):
            trainer = _trainer(file, kind=_Timed, max_seconds=seconds)
            trainer.train(tracker)
            steps.append(trainer.step)
    assert seconds <= _Timed.clock < seconds + 2 + 3
    assert steps[0] == steps[1] > 10


def request(outputs: Path, tokens: int, like: Sequence[str] = ()) -> list[TrainingText]:
    """Return training texts with at least this many answer tokens."""
    settings = OmegaConf.create({"outputs": str(outputs), "tokens": tokens, "max_new_tokens": 12, "batch": 4, "seed": 0})
    return write_texts(settings, tiny("llama"), Sampling(1.0), like)[0]


def answer_tokens(texts: list[TrainingText]) -> int:
    """Return the number of their answer tokens."""
    return sum(len(text.tokens) - text.begin for text in texts)


def test_more_texts_extend_those_that_exist_and_fewer_are_the_first_of_them(tmp_path: Path) -> None:
    few = request(tmp_path, 30)
    kept = next((tmp_path / "texts").glob("*.jsonl")).read_text(encoding="utf-8")
    more = request(tmp_path, 90)
    assert answer_tokens(few[:-1]) < 30 <= answer_tokens(few)
    assert answer_tokens(more[:-1]) < 90 <= answer_tokens(more)
    assert more[: len(few)] == few
    (file,) = (tmp_path / "texts").glob("*.jsonl")
    now = file.read_text(encoding="utf-8")
    assert now.startswith(kept)
    assert len(now.splitlines()) == len(more)
    assert request(tmp_path, 30) == few
    request(tmp_path / "other", 30)
    request(tmp_path / "other", 30, ["the one two three"])  # others, as they begin otherwise
    assert len(list((tmp_path / "other" / "texts").glob("*.jsonl"))) == 2
    assert file.read_text(encoding="utf-8") == now


def test_opening_texts_that_are_measured_prompts_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "served.jsonl"
    file.write_text('{"prompt": "What is served?"}\n{"messages": [{"role": "user", "content": "And measured?"}]}\n')
    assert opening_texts(None, PromptSet.of(["a"])) == []
    assert opening_texts(str(file), PromptSet.of(["a"])) == ["What is served?", "And measured?"]
    with pytest.raises(InputError, match="^begin_like: .* holds 1 of the prompts that are measured"):
        opening_texts(str(file), PromptSet.of(["a", "And  measured?\n"]))
    with pytest.raises(PromptError, match="^begin_like: cannot read"):
        opening_texts(str(tmp_path / "nothing.jsonl"), PromptSet.of(["a"]))


def test_practice_prompts_share_no_text_with_the_packaged_ones() -> None:
    """Eight consecutive words in common count as a copy."""
    file, packaged = resources.files("layerskip") / "data" / "practice.jsonl", PromptSet.packaged()
    assert len(opening_texts(str(file), packaged)) >= 100
    practice = PromptSet.load(str(file), "practice")
    assert {item.category for item in practice} == {item.category for item in packaged}
    texts = ([message["content"] for item in prompts for message in item.messages()] for prompts in (practice, packaged))
    one, other = ({run for text in some for run in _runs(text)} for some in texts)
    assert not one & other


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    words = text.lower().split()
    return zip(*(words[place:] for place in range(8)), strict=False)


def test_special_tokens_are_in_every_draft_vocabulary(tmp_path: Path) -> None:
    target = load_target(str(save_tiny(tmp_path / "model")))
    assert target.tokenizer is not None
    special = set(target.tokenizer.all_special_ids)
    assert special > set(target.eos_ids)
    often = TrainingText(tuple(range(40, 80)) * 3, 0)
    for size in (len(special), 30):
        tokens = drafted_tokens(target, [often], size)
        assert tokens is not None
        assert len(tokens) == size
        assert special <= set(tokens.tolist())

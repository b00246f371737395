"""Training texts that are requested more than once, and draft vocabularies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import resources
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from layerskip import PromptError, PromptSet, load_target
from layerskip.decoding.sampling import Sampling
from layerskip.texts.training_texts import TrainingText
from searches.app.checks import InputError
from searches.training.texts import drafted_tokens, opening_texts, write_texts
from tests.drafters.heads import tiny
from tests.searches.programs import FORKS
from tests.tiny import save_tiny


def request(outputs: Path, tokens: int, like: Sequence[str] = ()) -> list[TrainingText]:
    """Return training texts with at least this many answer tokens."""
    settings = OmegaConf.create({"outputs": str(outputs), "tokens": tokens, "max_new_tokens": 12, "batch": 4, "seed": 0})
    return write_texts(settings, tiny("llama"), Sampling(1.0), like)


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
    assert file.read_text(encoding="utf-8") == now


def test_two_programs_write_the_same_texts_once(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, FORKS) as programs:
        both = list(programs.map(request, [tmp_path] * 2, [90, 90]))
    alone = request(tmp_path / "alone", 90)
    assert both == [alone, alone]
    (file,) = (tmp_path / "texts").glob("*.jsonl")
    assert len(file.read_text(encoding="utf-8").splitlines()) == len(alone)


def test_opening_texts_that_are_measured_prompts_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "served.jsonl"
    file.write_text('{"prompt": "What is served?"}\n{"messages": [{"role": "user", "content": "And measured?"}]}\n')
    assert opening_texts("begin_like", None, PromptSet.of(["a"])) == []
    assert opening_texts("begin_like", str(file), PromptSet.of(["a"])) == ["What is served?", "And measured?"]
    with pytest.raises(InputError, match="^begin_like: .* holds 1 of the prompts that are measured"):
        opening_texts("begin_like", str(file), PromptSet.of(["a", "And  measured?\n"]))
    with pytest.raises(PromptError, match="^begin_like: cannot read"):
        opening_texts("begin_like", str(tmp_path / "nothing.jsonl"), PromptSet.of(["a"]))


def test_practice_prompts_share_no_text_with_the_packaged_ones() -> None:
    """Eight consecutive words in common count as a copy."""
    file, packaged = resources.files("layerskip") / "data" / "practice.jsonl", PromptSet.packaged()
    assert len(opening_texts("begin_like", str(file), packaged)) >= 100
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

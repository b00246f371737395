"""Drafting with a model of another tokenizer: the contract, translation, refusals, and SmolLM2 as a draft of Gemma 3."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from layerskip import DraftPlan, PromptSet, generate, save_draft_checkpoint
from layerskip.config import ConfigError, SpeculativeConfig, StopRule
from layerskip.decoding.drafter import Drafter
from layerskip.drafters.cross_tokenizer import CrossTokenizer, Translation
from layerskip.drafters.registry import build_drafter
from layerskip.models.loading import WHEELS, load_target
from layerskip.models.target import Target, TargetError
from tests.accelerator import DEVICE
from tests.drafters.contract import DrafterContract, contract, toy_target
from tests.drafters.members import LETTERS, spelling
from tests.drafters.test_draft_model import noisy_copy, respelled
from tests.exhaustive import EXHAUSTIVE
from tests.reference import generated
from tests.tiny import save_tiny, tokenizer, without_tokenizer


def _near(target: Target) -> PreTrainedModel:
    return noisy_copy(target, 0.0 if target is toy_target() else 0.06)  # greedy drafts of the toy are seldom right


def _reversed_letters(target: Target) -> tuple[PreTrainedModel, Translation]:
    size, end = target.vocabulary, "b" if target is toy_target() else None
    letters = LETTERS[:size]
    pairs = (letters[3] + letters[4], letters[2] + letters[0])
    model = respelled(_near(target), [*reversed(range(size)), 4, 0])
    return model, Translation(spelling(letters, end=end), spelling(letters[::-1], pairs, end))


def _other_letters(target: Target) -> Drafter:
    """The draft counts its letters from the end and has tokens for pairs; the target's end token is a letter to it."""
    model, translation = _reversed_letters(target)
    return CrossTokenizer(model, target.layers, model.config.vocab_size, translation, 3, StopRule())


TestOtherLetters = contract(_other_letters)


def _uneven(target: Target) -> Drafter:
    """Each tokenizer has a letter that its model or the target lacks: one cannot be read, one cannot be output."""
    size, end = target.vocabulary, "b" if target is toy_target() else None
    letters = LETTERS[:size]
    model = respelled(_near(target), [0, *reversed(range(1, size))])
    translation = Translation(spelling(letters + "A", end=end), spelling("A" + letters[::-1], end=end))
    return CrossTokenizer(model, target.layers, size, translation, 3, StopRule())


TestUnevenVocabularies = contract(_uneven, samples_by_default=False, samplings=DrafterContract.samplings[:2])


def test_texts_are_encoded_like_each_tokenizer_encodes_them() -> None:
    letters, pairs = spelling("abcdef"), spelling("fedcba", ("ab", "cd"))
    translation = Translation(letters, pairs)
    known = translation.to_draft([0, 1, 2])
    assert pairs.decode(known) == "abc"
    longer = translation.to_draft([0, 1, 2, 3, 0], 3, known)  # "cd" has become one token
    assert longer == pairs("abcda")["input_ids"]
    assert translation.to_target([0, 1, 2], known, pairs("dab")["input_ids"]) == [3, 0, 1]


def test_incremental_encoding_equals_encoding_the_whole_text() -> None:
    """With real byte-level tokens, whose merges reach across any border, and characters that are cut in two."""
    ours = tokenizer(chat=False)
    text = "the quick brown fox — the naïve ox in the inn! on a thin " * 3
    tokens = ours(text)["input_ids"]
    translation = Translation(ours, ours)
    known: list[int] = []
    for end in range(1, len(tokens) + 1):
        known = translation.to_draft(tokens[:end], end - 1, known)
    assert known == tokens


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_models_without_a_tokenizer_are_refused(tmp_path: Path, family: str) -> None:
    """transformers cannot make a tokenizer for one family, and makes an empty one for the other."""
    target = load_target(str(save_tiny(tmp_path / "target")), dtype="float32", device=DEVICE)
    bare = without_tokenizer(save_tiny(tmp_path / "bare", family))
    for method in ("cross_tokenizer", "draft_model", "draft_model"):  # loaded once, it is refused again
        with pytest.raises(TargetError, match=rf"^draft_model: {bare} has no tokenizer, so its tokens cannot be matched$"):
            build_drafter(SpeculativeConfig(method, draft_model=str(bare)), target)
    target = load_target(str(bare), dtype="float32", device=DEVICE)
    draft = str(save_tiny(tmp_path / "draft"))
    with pytest.raises(TargetError, match=f"^draft_model: {target.name} has no tokenizer"):
        build_drafter(SpeculativeConfig("cross_tokenizer", draft_model=draft), target)
    assert build_drafter(SpeculativeConfig("draft_model", draft_model=draft), target)  # they cannot be compared


def test_a_tokenizer_that_does_not_match_is_refused(tmp_path: Path) -> None:
    target = load_target(str(save_tiny(tmp_path / "target")), dtype="float32", device=DEVICE)
    target.drafts["greek"] = Target(target.model, spelling("αβγδ"), "greek")
    with pytest.raises(ConfigError, match="^draft_model: its tokenizer does not reproduce the target's text"):
        build_drafter(SpeculativeConfig("cross_tokenizer", draft_model="greek"), target)


def test_a_draft_with_another_tokenizer_does_not_change_the_output(smollm2: Target, tmp_path: Path) -> None:
    """SmolLM2 drafts for Gemma 3 270M. Skipped without ``make gemma``."""
    pytest.importorskip(WHEELS["gemma3"].package)
    gemma3 = load_target("gemma3", dtype="float32", device=DEVICE)
    draft = save_draft_checkpoint(smollm2, DraftPlan.none(smollm2.layers), tmp_path)
    config, accepted = SpeculativeConfig("cross_tokenizer", 4, draft_model=str(draft)), 0
    for item in PromptSet.packaged().take(None if EXHAUSTIVE else 3):
        result = generate(gemma3, item.messages(), config, max_new_tokens=24)
        assert result.tokens == generated(gemma3.model, gemma3.encode(item.messages()), 24)
        accepted += result.stats.accepted
    assert accepted > 0

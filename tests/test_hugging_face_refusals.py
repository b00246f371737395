"""``custom_generate`` refuses unsupported arguments by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from layerskip import ExportError, Target
from tests.families import build
from tests.test_hugging_face import CONFIGS, GREEDY, PROMPT, _generate, _method


@pytest.fixture
def model(tiny_target: Target) -> PreTrainedModel:
    return tiny_target.model


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_beams": 2}, "num_beams|batch"),
        ({"num_return_sequences": 2, "do_sample": True}, "batch of 2"),
        ({"bad_words_ids": [[30]]}, "NoBadWordsLogitsProcessor"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
        ({"min_new_tokens": 3}, "MinLengthLogitsProcessor|MinNewTokens"),
        (
            {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=9)]},
            "RepetitionPenalty",
        ),
        ({"typical_p": 0.5, "do_sample": True}, "TypicalLogitsWarper"),
        ({"logits_processor": [TopKLogitsWarper(5)], "do_sample": True, "top_k": 50}, "TopKLogitsWarper appears twice"),
        ({"logits_processor": [TopPLogitsWarper(0.8)], "do_sample": True, "temperature": 0.7}, "another order"),
        (
            {"logits_processor": [TopPLogitsWarper(0.8, min_tokens_to_keep=3)], "do_sample": True, "top_k": 0},
            "TopP.*min_tokens_to_keep",
        ),
        ({"logits_processor": [RepetitionPenaltyLogitsProcessor(by) for by in (1.2, 1.3)]}, "appears twice"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search is not supported"),
        ({"dola_layers": "low"}, "dola_generation is not supported"),
    ],
)
def test_unsupported_options_are_refused_by_name(tiny_target: Target, options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        _generate(tiny_target.model, custom_generate=_method(tiny_target, CONFIGS[1]), **GREEDY | options)


def test_stop_strings_are_refused_at_once(tiny_target: Target) -> None:
    """Transformers does so itself, as it passes its tokenizer to no custom method."""
    given = GREEDY | {"stop_strings": ["the"], "tokenizer": tiny_target.tokenizer}
    with pytest.raises(ValueError, match="stop strings"):
        _generate(tiny_target.model, custom_generate=_method(tiny_target, CONFIGS[1]), **given)


def test_a_token_beyond_the_vocabulary_is_refused(model: PreTrainedModel, tiny_target: Target) -> None:
    with pytest.raises(ValueError, match="^input_ids: the token 9999 is beyond the vocabulary"):
        _generate(model, torch.tensor([[7, 9999]]), custom_generate=_method(tiny_target, CONFIGS[0]), **GREEDY)


def test_a_batch_is_refused(model: PreTrainedModel, tiny_target: Target) -> None:
    prompts = PROMPT.repeat(2, 1)
    with pytest.raises(ValueError, match="batch of 2"):
        _generate(model, prompts, custom_generate=_method(tiny_target, CONFIGS[0]), **GREEDY)


def test_padding_is_refused(model: PreTrainedModel, tiny_target: Target) -> None:
    padded = torch.cat((torch.zeros(1, 2, dtype=torch.int64), PROMPT), dim=1)
    method = _method(tiny_target, CONFIGS[0])
    for mask in ((padded != 0).long(), None):
        with pytest.raises(ValueError, match="attention_mask: "):
            model.generate(padded, attention_mask=mask, custom_generate=method, **GREEDY)


def test_input_embeddings_are_refused(model: PreTrainedModel, tiny_target: Target) -> None:
    embeddings = model.get_input_embeddings()(PROMPT)
    method = _method(tiny_target, CONFIGS[0])
    for tokens in (None, PROMPT):
        with pytest.raises(ValueError, match="inputs_embeds"):
            model.generate(tokens, inputs_embeds=embeddings, custom_generate=method, **GREEDY)


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [("gpt2", {"num_hidden_layers": 3}, "architecture"), ("llama", {"num_hidden_layers": 4}, "layers")],
)
def test_another_model_is_refused_by_field(tiny_target: Target, family: str, changes: dict[str, int], field: str) -> None:
    method = _method(tiny_target, CONFIGS[0])
    with pytest.raises(ExportError, match=f"^target.{field}: "):
        _generate(build(family, **changes), custom_generate=method, **GREEDY)

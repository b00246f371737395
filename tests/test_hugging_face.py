"""Decoding with ``custom_generate`` compared with plain ``model.generate``; unsupported arguments are refused by name."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MaxTimeCriteria,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
    TextIteratorStreamer,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from layerskip import Export, ExportError, SpeculativeConfig, Target, TargetError
from tests.families import build

CONFIGS = [
    SpeculativeConfig(),
    SpeculativeConfig("layer_skip", mask="attention:0;mlp:1", num_speculative_tokens=3),
    SpeculativeConfig("prompt_lookup", prompt_lookup_min=1, prompt_lookup_max=2, num_speculative_tokens=6),
    SpeculativeConfig("retrieval", num_speculative_tokens=3),
    SpeculativeConfig("lookahead", num_speculative_tokens=2, window=3),
    SpeculativeConfig("token_recycling", num_speculative_tokens=3, min_token_prob=0.0),
]
PROMPT = torch.tensor([[9, 30, 31, 9, 30, 40, 41, 42, 31]])
GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=32)
LATER_PENALTY = RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=9)
kinds = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)


def _method(target: Target, config: SpeculativeConfig) -> Callable[..., Any]:
    return Export(Export.describe(target), config).custom_generate()


def _generate(model: PreTrainedModel, prompt: Tensor = PROMPT, **options: Any) -> Any:
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def _both(target: Target, config: SpeculativeConfig, **options: Any) -> tuple[list[int], list[int]]:
    """The new tokens with ``custom_generate`` and without it."""
    ours = _generate(target.model, custom_generate=_method(target, config), **options)
    theirs = _generate(target.model, **options)
    assert ours.dtype == theirs.dtype
    assert ours[:, : PROMPT.shape[1]].equal(PROMPT)
    return ours[0, PROMPT.shape[1] :].tolist(), theirs[0, PROMPT.shape[1] :].tolist()


def test_draft_models_with_another_tokenizer_use_the_given_tokenizer(tiny_target: Target, tiny_folder: Path) -> None:
    other = SpeculativeConfig("cross_tokenizer", draft_model=str(tiny_folder), num_speculative_tokens=2)
    for config in (other, SpeculativeConfig("cascade", members=(CONFIGS[2], other))):
        method = Export(Export.describe(tiny_target), config).custom_generate(tiny_target.tokenizer)
        ours = _generate(tiny_target.model, custom_generate=method, **GREEDY)
        assert ours.equal(_generate(tiny_target.model, **GREEDY))
        with pytest.raises(TargetError, match="^draft_model: .* has no tokenizer"):
            _generate(tiny_target.model, custom_generate=_method(tiny_target, config), **GREEDY)


@kinds
def test_inputs_of_a_tokenizer_are_continued_as_by_generate(tiny_target: Target, config: SpeculativeConfig) -> None:
    assert tiny_target.tokenizer is not None
    inputs = tiny_target.tokenizer("the rain in the on", return_tensors="pt")
    expected = tiny_target.model.generate(**inputs, **GREEDY)
    actual = tiny_target.model.generate(**inputs, **GREEDY, custom_generate=_method(tiny_target, config))
    assert actual.equal(expected)
    assert actual.shape[1] == inputs["input_ids"].shape[1] + 32


@kinds
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(
    "lengths",
    [{"max_new_tokens": 1}, {"max_new_tokens": 7}, {"max_length": 20}, {"max_length": 10}, {}],
    ids=lambda lengths: "".join(f"{name} {value}" for name, value in lengths.items()) or "default",
)
def test_lengths_are_those_of_generate(tiny_target: Target, config: SpeculativeConfig, lengths: dict[str, int]) -> None:
    ours, theirs = _both(tiny_target, config, do_sample=False, **lengths)
    assert ours == theirs


@kinds
def test_any_of_several_end_tokens_ends_generation(tiny_target: Target, config: SpeculativeConfig) -> None:
    free, _ = _both(tiny_target, config, **GREEDY)
    for ends in ([1, free[12]], [free[20], free[5]], free[3]):
        ours, theirs = _both(tiny_target, config, eos_token_id=ends, **GREEDY)
        assert ours == theirs
        assert len(ours) < 32


@kinds
def test_stop_strings_end_generation(tiny_target: Target, config: SpeculativeConfig) -> None:
    free, _ = _both(tiny_target, config, **GREEDY)
    text = tiny_target.decode(free)
    criteria = [StopStringCriteria(tiny_target.tokenizer, [text[14:17], "no such text"])]
    ours, theirs = _both(tiny_target, config, stopping_criteria=criteria, **GREEDY)
    assert ours == theirs
    assert text[14:17] in tiny_target.decode(ours)
    assert len(ours) < 32


class Ending(StoppingCriteria):
    """End a sequence at a length that depends on its content."""

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        return (input_ids.sum(-1) % 7 == 0) & (input_ids.shape[1] > 14)


@kinds
def test_a_custom_stopping_criterion_ends_generation(tiny_target: Target, config: SpeculativeConfig) -> None:
    ours, theirs = _both(tiny_target, config, stopping_criteria=[Ending()], **GREEDY)
    assert ours == theirs
    assert len(ours) < 32


@pytest.mark.parametrize("own", [MaxLengthCriteria(14), MaxLengthCriteria(60), MaxLengthCriteria(4)])
def test_a_given_length_criterion_replaces_generates(tiny_target: Target, own: MaxLengthCriteria) -> None:
    for config in CONFIGS[:3]:
        ours, theirs = _both(tiny_target, config, stopping_criteria=[own], **GREEDY)
        assert ours == theirs


def test_a_given_end_criterion_replaces_generates(tiny_target: Target) -> None:
    free, _ = _both(tiny_target, CONFIGS[0], **GREEDY)
    own = [EosTokenCriteria([free[12]])]
    for config in CONFIGS[:3]:
        ours, theirs = _both(tiny_target, config, stopping_criteria=own, eos_token_id=free[3], **GREEDY)
        assert ours == theirs
        assert len(ours) > 4


class Longer(MaxLengthCriteria):
    """A criterion of transformers with an additional condition."""

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        return super().__call__(input_ids, scores, **options) | (input_ids[:, -1] % 3 == 0)  # type: ignore[arg-type, return-value]


def test_a_subclass_of_generates_criteria_is_called(tiny_target: Target) -> None:
    for config in CONFIGS[:3]:
        ours, theirs = _both(tiny_target, config, stopping_criteria=[Longer(30)], **GREEDY)
        assert ours == theirs
        assert len(ours) < 21


def test_a_time_limit_ends_generation(tiny_target: Target) -> None:
    criteria = [MaxTimeCriteria(max_time=60.0, initial_timestamp=0.0)]  # expired in 1970
    ours, theirs = _both(tiny_target, CONFIGS[0], stopping_criteria=criteria, **GREEDY)
    assert ours == theirs
    assert len(ours) == 1


@kinds
def test_the_repetition_penalty_is_that_of_generate(tiny_target: Target, config: SpeculativeConfig) -> None:
    ours, theirs = _both(tiny_target, config, repetition_penalty=1.8, **GREEDY)
    plain, _ = _both(tiny_target, config, **GREEDY)
    assert ours == theirs != plain


@kinds
def test_a_dictionary_is_returned_on_request(tiny_target: Target, config: SpeculativeConfig) -> None:
    options = GREEDY | {"return_dict_in_generate": True}
    ours = _generate(tiny_target.model, custom_generate=_method(tiny_target, config), **options)
    theirs = _generate(tiny_target.model, **options)
    assert type(ours) is type(theirs)
    assert ours.sequences.equal(theirs.sequences)


@kinds
def test_committed_tokens_are_streamed_to_a_callback(tiny_target: Target, config: SpeculativeConfig) -> None:
    parts: list[list[int]] = []
    result = _generate(tiny_target.model, custom_generate=_method(tiny_target, config), callback=parts.append, **GREEDY)
    assert [token for part in parts for token in part] == result[0, PROMPT.shape[1] :].tolist()
    assert len(parts) > 1


class Puts(BaseStreamer):
    """Records everything that it gets."""

    def __init__(self) -> None:
        self.got: list[list[int] | None] = []

    def put(self, value: Tensor) -> None:
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.got.append(None)


@kinds
def test_a_streamer_gets_what_generate_gives_it(tiny_target: Target, config: SpeculativeConfig) -> None:
    ours, theirs, heard = Puts(), Puts(), []
    method = _method(tiny_target, config)
    _generate(tiny_target.model, custom_generate=method, streamer=ours, callback=heard.extend, **GREEDY)
    _generate(tiny_target.model, streamer=theirs, **GREEDY)
    assert ours.got == theirs.got
    assert [[token] for token in heard] == ours.got[1:-1]


def test_a_reader_of_a_streamer_reaches_its_end(tiny_target: Target) -> None:
    streamer = TextIteratorStreamer(tiny_target.tokenizer, skip_prompt=True, timeout=60)
    method = _method(tiny_target, CONFIGS[2])
    with ThreadPoolExecutor(1) as pool:
        output = pool.submit(_generate, tiny_target.model, custom_generate=method, streamer=streamer, **GREEDY)
        text = "".join(streamer)
    assert text == tiny_target.decode(output.result()[0, PROMPT.shape[1] :].tolist())


@kinds
@pytest.mark.parametrize(
    "warping",
    [
        {"temperature": 0.6},
        {"top_k": 3},
        {"top_p": 0.3},
        {"min_p": 0.4},
        {"top_k": 2, "repetition_penalty": 2.0},
    ],
    ids=lambda warping: ", ".join(warping),
)
def test_sampling_parameters_are_applied(tiny_target: Target, config: SpeculativeConfig, warping: dict[str, float]) -> None:
    """Every sampled token has a non-zero probability after generate's own processors."""
    options = dict(do_sample=True, max_new_tokens=24, top_k=0) | warping
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(_generate(tiny_target.model, custom_generate=_method(tiny_target, config), **options))
    assert outputs[0].equal(outputs[1])
    assert not outputs[0].equal(outputs[2])
    for output in outputs[1:]:
        scores = _scores(tiny_target.model, output, options)
        taken = scores.gather(1, output[0, PROMPT.shape[1] :, None])
        assert torch.isfinite(taken).all()


@kinds
def test_the_temperature_is_applied(tiny_target: Target, config: SpeculativeConfig) -> None:
    cold, _ = _both(tiny_target, config, do_sample=True, temperature=1e-4, top_k=0, max_new_tokens=32)
    greedy, _ = _both(tiny_target, config, **GREEDY)
    hot, _ = _both(tiny_target, config, do_sample=True, temperature=20.0, top_k=0, max_new_tokens=32)
    assert cold == greedy != hot


def _scores(model: PreTrainedModel, output: Tensor, options: dict[str, Any]) -> Tensor:
    """``[n, V]``: generate's own scores after every prefix of an output; -inf excludes a token."""
    rows = []
    for length in range(PROMPT.shape[1], output.shape[1]):
        result = _generate(
            model,
            output[:, :length],
            **options | {"max_new_tokens": 1},
            output_scores=True,
            return_dict_in_generate=True,
        )
        rows.append(result.scores[0][0])
    return torch.stack(rows)


def test_one_method_serves_several_models(tiny_target: Target) -> None:
    method = _method(tiny_target, CONFIGS[1])
    models = [build("llama", seed, num_hidden_layers=3) for seed in (1, 2)]
    for model in (*models, *models):
        assert _generate(model, custom_generate=method, **GREEDY).equal(_generate(model, **GREEDY))


def test_a_method_continues_after_a_dtype_change(tiny_target: Target) -> None:
    model = build("llama", num_hidden_layers=3)
    for config in CONFIGS:
        method = _method(tiny_target, config)
        assert _generate(model.float(), custom_generate=method, **GREEDY).equal(_generate(model, **GREEDY))
        model.bfloat16()
        assert _generate(model, custom_generate=method, **GREEDY).shape == (1, PROMPT.shape[1] + 32)


@kinds
def test_threads_take_turns_on_one_model(tiny_target: Target, config: SpeculativeConfig) -> None:
    method = _method(tiny_target, config)
    prompts = [PROMPT[:, begin:] for begin in range(4)]
    expected = [_generate(tiny_target.model, prompt, **GREEDY) for prompt in prompts]

    def ours(prompt: Tensor) -> Tensor:
        output: Tensor = _generate(tiny_target.model, prompt, custom_generate=method, **GREEDY)
        return output

    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(ours, prompts * 3))
    assert all(one.equal(other) for one, other in zip(actual, expected * 3, strict=True))


def test_a_hook_on_the_model_applies_until_it_is_removed(tiny_target: Target) -> None:
    model = build("llama", num_hidden_layers=3)
    method = _method(tiny_target, CONFIGS[1])
    plain = _generate(model, **GREEDY)
    for _ in range(2):
        assert _generate(model, custom_generate=method, **GREEDY).equal(plain)
        hook = model.model.layers[1].register_forward_hook(lambda module, inputs, output: output + 0.5)
        steered = _generate(model, **GREEDY)
        assert not steered.equal(plain)
        assert _generate(model, custom_generate=method, **GREEDY).equal(steered)
        hook.remove()


def test_a_method_does_not_keep_a_model_alive(tiny_target: Target) -> None:
    method = _method(tiny_target, CONFIGS[0])
    model = build("llama", num_hidden_layers=3)
    _generate(model, custom_generate=method, **GREEDY)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


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

"""Decoding with ``custom_generate`` compared with plain ``model.generate``; unsupported arguments are refused by name."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
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
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from layerskip import Export, ExportError, SpeculativeConfig, Target, TargetError
from tests.exhaustive import representative
from tests.families import build

CONFIGS = [
    SpeculativeConfig("layer_skip", mask="attention:0;mlp:1", num_speculative_tokens=3),
    SpeculativeConfig("prompt_lookup", prompt_lookup_min=1, prompt_lookup_max=2, num_speculative_tokens=6),
    SpeculativeConfig("token_recycling", num_speculative_tokens=3, min_token_prob=0.0),
]
CONFIGS += representative([], [SpeculativeConfig(), SpeculativeConfig("lookahead", num_speculative_tokens=2, window=3)])
PROMPT = torch.tensor([[9, 30, 31, 9, 30, 40, 41, 42, 31]])
GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=32)
kinds = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)


def _method(target: Target, config: SpeculativeConfig) -> Callable[..., Any]:
    return Export(target.describe(), config).custom_generate()


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
    for config in (other, SpeculativeConfig("cascade", members=(CONFIGS[1], other))):
        method = Export(tiny_target.describe(), config).custom_generate(tiny_target.tokenizer)
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


class Ending(StoppingCriteria):
    """End a sequence at a length that depends on its content."""

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        return (input_ids.sum(-1) % 7 == 0) & (input_ids.shape[1] > 14)


EXPIRED = MaxTimeCriteria(max_time=60.0, initial_timestamp=0.0)  # in 1970
ENDS: dict[str, tuple[Callable[[Target, list[int]], dict[str, Any]], int, int]] = {
    "a length": (lambda target, free: {"max_new_tokens": None, "max_length": 20}, 11, 11),
    "the default length": (lambda target, free: {"max_new_tokens": None}, 1, 20),
    "several end tokens": (lambda target, free: {"eos_token_id": [free[20], free[5]]}, 1, 6),
    "stop strings": (
        lambda target, free: {
            "stopping_criteria": [StopStringCriteria(target.tokenizer, [target.decode(free)[14:17], "no such text"])]
        },
        2, 31,
    ),
    "a criterion": (lambda target, free: {"stopping_criteria": [Ending()]}, 2, 31),
    "a time limit": (lambda target, free: {"stopping_criteria": [EXPIRED]}, 1, 1),
    # Given criteria of generate's own classes replace its own.
    "a length criterion": (lambda target, free: {"stopping_criteria": [MaxLengthCriteria(14)]}, 5, 5),
    "a longer length criterion": (lambda target, free: {"stopping_criteria": [MaxLengthCriteria(60)]}, 33, 51),
    "a length criterion of the prompt": (lambda target, free: {"stopping_criteria": [MaxLengthCriteria(4)]}, 1, 1),
    "an end criterion": (
        lambda target, free: {"stopping_criteria": [EosTokenCriteria([free[12]])], "eos_token_id": free[3]}, 5, 32
    ),
}  # fmt: skip
"""Options of ``generate``, made of a target and its plain output, with the fewest and the most new tokens."""


@kinds
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("end", ENDS)
def test_generation_ends_where_generate_ends_it(tiny_target: Target, config: SpeculativeConfig, end: str) -> None:
    free = _generate(tiny_target.model, **GREEDY)[0, PROMPT.shape[1] :].tolist()
    options, fewest, most = ENDS[end]
    ours, theirs = _both(tiny_target, config, **GREEDY | options(tiny_target, free))
    assert ours == theirs
    assert fewest <= len(ours) <= most


class Puts(BaseStreamer):
    """Records everything that it gets."""

    def __init__(self) -> None:
        self.got: list[list[int] | None] = []

    def put(self, value: Tensor) -> None:
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.got.append(None)


@kinds
def test_tokens_are_streamed_as_by_generate_and_a_dictionary_is_returned_on_request(
    tiny_target: Target, config: SpeculativeConfig
) -> None:
    ours, theirs, parts, model = Puts(), Puts(), [], tiny_target.model
    method, options = _method(tiny_target, config), GREEDY | {"return_dict_in_generate": True}
    result = _generate(model, custom_generate=method, streamer=ours, callback=parts.append, **options)
    expected = _generate(model, streamer=theirs, **options)
    assert type(result) is type(expected)
    assert result.sequences.equal(expected.sequences)
    assert ours.got == theirs.got
    assert [[token] for part in parts for token in part] == ours.got[1:-1]
    assert len(parts) > 1


WARPINGS = [{"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.4}, {"top_k": 2, "repetition_penalty": 2.0}]


@pytest.mark.parametrize("config", representative(CONFIGS[:1], CONFIGS[1:]), ids=lambda config: config.method)
@pytest.mark.parametrize("warping", WARPINGS, ids=", ".join)
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
        taken = _scores(tiny_target.model, output, options).gather(1, output[0, PROMPT.shape[1] :, None])
        assert torch.isfinite(taken).all()


@kinds
def test_temperature_and_repetition_penalty_are_those_of_generate(tiny_target: Target, config: SpeculativeConfig) -> None:
    greedy, _ = _both(tiny_target, config, **GREEDY)
    ours, theirs = _both(tiny_target, config, repetition_penalty=1.8, **GREEDY)
    assert ours == theirs != greedy
    cold, hot = (
        _both(tiny_target, config, do_sample=True, temperature=temperature, top_k=0, max_new_tokens=32)[0]
        for temperature in (1e-4, 20.0)
    )
    assert cold == greedy != hot


def _scores(model: PreTrainedModel, output: Tensor, options: dict[str, Any]) -> Tensor:
    """``[n, V]``: generate's own scores after every prefix of an output; -inf excludes a token."""
    options = options | {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    lengths = range(PROMPT.shape[1], output.shape[1])
    return torch.stack([_generate(model, output[:, :length], **options).scores[0][0] for length in lengths])


@kinds
def test_one_method_serves_several_models_also_after_a_change_of_dtype(
    tiny_target: Target, config: SpeculativeConfig
) -> None:
    method, models = _method(tiny_target, config), [build("llama", seed, num_hidden_layers=3) for seed in (1, 2)]
    for model in (*models, models[0]):
        assert _generate(model.float(), custom_generate=method, **GREEDY).equal(_generate(model, **GREEDY))
        model.bfloat16()
        assert _generate(model, custom_generate=method, **GREEDY).shape == (1, PROMPT.shape[1] + 32)


def test_a_hook_on_the_model_applies_until_it_is_removed(tiny_target: Target) -> None:
    model = build("llama", num_hidden_layers=3)
    method = _method(tiny_target, CONFIGS[0])
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


SAMPLED = dict(do_sample=True, top_k=0)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_beams": 2}, "num_beams|batch"),
        ({"num_return_sequences": 2, "do_sample": True}, "batch of 2"),
        ({"stop_strings": ["the"]}, "stop strings"),
        ({"bad_words_ids": [[30]]}, "NoBadWordsLogitsProcessor"),
        ({"logits_processor": [RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=9)]}, "RepetitionPenalty"),
        ({"logits_processor": [TopKLogitsWarper(5)], "do_sample": True, "top_k": 50}, "TopKLogitsWarper appears twice"),
        ({"logits_processor": [TopPLogitsWarper(0.8)], "do_sample": True, "temperature": 0.7}, "another order"),
        ({"logits_processor": [TopPLogitsWarper(0.8, min_tokens_to_keep=3)]} | SAMPLED, "TopP.*min_tokens_to_keep"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search is not supported"),
        ({"output_logits": True, "return_dict_in_generate": True}, "^output_logits: is not available"),
    ],
)
def test_unsupported_options_are_refused_by_name(tiny_target: Target, options: dict[str, Any], name: str) -> None:
    words = {"tokenizer": tiny_target.tokenizer} if "stop_strings" in options else {}
    with pytest.raises(ValueError, match=name):
        _generate(tiny_target.model, custom_generate=_method(tiny_target, CONFIGS[0]), **GREEDY | options | words)


@pytest.mark.parametrize("end", [-1, 10**6, [3, 10**6]])
def test_ends_that_are_no_token_ids_are_refused_by_name(tiny_target: Target, end: object) -> None:
    with pytest.raises(ValueError, match=r"^target: generation_config\.eos_token_id=.* is not a whole number from 0 to"):
        _generate(tiny_target.model, custom_generate=_method(tiny_target, CONFIGS[0]), **GREEDY | {"eos_token_id": end})


def test_inputs_other_than_one_whole_prompt_and_other_models_are_refused(tiny_target: Target) -> None:
    model, method = tiny_target.model, _method(tiny_target, SpeculativeConfig())
    padded = torch.cat((torch.zeros(1, 2, dtype=torch.int64), PROMPT), dim=1)
    embeddings = model.get_input_embeddings()(PROMPT)
    for tokens, inputs, message in (
        (torch.tensor([[7, 9999]]), {}, "^input_ids: the token 9999 is beyond the vocabulary"),
        (PROMPT.repeat(2, 1), {}, "batch of 2"),
        (padded, {"attention_mask": (padded != 0).long()}, "attention_mask: "),
        (padded, {"attention_mask": None}, "attention_mask: "),
        (None, {"inputs_embeds": embeddings}, "inputs_embeds"),
        (PROMPT, {"inputs_embeds": embeddings}, "inputs_embeds"),
        (PROMPT, {"past_key_values": model(PROMPT[:, :-1]).past_key_values}, "^past_key_values: a filled cache"),
        (PROMPT, {"position_ids": torch.arange(1, PROMPT.shape[1] + 1)[None]}, "^position_ids: "),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(tokens, custom_generate=method, **inputs, **GREEDY)
    with pytest.raises(ExportError, match="^target.layers: "):
        _generate(build("llama", num_hidden_layers=4), custom_generate=method, **GREEDY)

"""What a checkpoint asks of ``generate``: every field that changes greedy tokens is applied, or refused by name."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedModel

from layerskip import Sampling, SpeculativeConfig, Target, TargetError, generate, measure
from layerskip.decoding import checkpoint_settings
from layerskip.decoding.checkpoint_settings import check_settings
from layerskip.hugging_face import custom_generate
from tests.drafters.contract import greedy_tokens
from tests.families import build

PROMPT = [3, 4, 5, 3, 4, 5, 3]
PLAIN, LOOKUP = SpeculativeConfig(), SpeculativeConfig(method="prompt_lookup")

# Values with which transformers' own generate gives the same tokens.
HARMLESS: dict[str, Any] = {
    "do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.8, "min_p": 0.1, "top_h": 0.5, "typical_p": 0.5,
    "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "max_length": 3, "max_new_tokens": 2, "early_stopping": True,
    "length_penalty": 2.0, "num_beam_groups": 2, "diversity_penalty": 0.5, "low_memory": True, "bos_token_id": 3,
    "pad_token_id": 3, "decoder_start_token_id": 3, "output_attentions": True, "output_hidden_states": True,
    "output_scores": True, "output_logits": True, "return_dict_in_generate": True, "use_cache": False,
    "cache_implementation": "static", "cache_config": {}, "max_cache_len": 64, "prefill_chunk_size": 4,
    "disable_compile": True, "prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2, "assistant_early_exit": 1,
    "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.9,
    "assistant_lookbehind": 3, "target_lookbehind": 3, "speculation_type": "dflash", "eos_token_id": 11,
}  # fmt: skip
# Fields that need other models or engines, or describe the file.
ELSEWHERE = {"use_mtp", "continuous_batching_config", "compile_config", "_from_model_config", "transformers_version"}
# Values with which transformers' generate gives other tokens, or refuses to decode.
CHANGING: dict[str, Any] = {
    "bad_words_ids": [[7]], "suppress_tokens": [7], "begin_suppress_tokens": [7], "sequence_bias": [[[7], -10.0]],
    "forced_eos_token_id": 7, "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2, "guidance_scale": 1.5,
    "encoder_repetition_penalty": 3.0, "exponential_decay_length_penalty": (1, 2.0), "max_time": 1e-9,
    "stop_strings": "a", "token_healing": True, "penalty_alpha": 0.6, "dola_layers": "low", "constraints": [1],
    "force_words_ids": [[3]], "num_return_sequences": 2, "is_assistant": True,
}  # fmt: skip
# Refused as well, though this short text does not show a difference.
FURTHER: dict[str, Any] = {
    "min_length": 12, "min_new_tokens": 4, "num_beams": 3, "forced_bos_token_id": 0, "remove_invalid_values": True,
    "renormalize_logits": True, "watermarking_config": {"bias": 5.0}, "cache_implementation": "quantized",
    "assistant_ensemble_weight": 0.5,
}  # fmt: skip
KNOWN = {*vars(GenerationConfig())}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build("llama", 1, vocab_size=12, eos_token_id=11)


@pytest.fixture
def target(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A target with a generation configuration of its own."""
    monkeypatch.setattr(model, "generation_config", copy.deepcopy(model.generation_config))
    return Target(model)


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> list[int]:
    return _generate(Target(model))


def _generate(target: Target, **options: Any) -> list[int]:
    return greedy_tokens(target, PROMPT, max_new_tokens=8, **options)


def _set(target: Target, name: str, value: Any) -> None:
    setattr(target.model.generation_config, name, value)


@pytest.mark.parametrize("name", sorted(KNOWN & HARMLESS.keys()))
def test_fields_that_change_no_greedy_token_are_accepted(target: Target, plain: list[int], name: str) -> None:
    _set(target, name, HARMLESS[name])
    assert _generate(target) == plain
    assert [generate(target, PROMPT, config, max_new_tokens=8).tokens for config in (PLAIN, LOOKUP)] == [plain, plain]


def test_the_default_values_of_generate_are_accepted(target: Target) -> None:
    """Checkpoints often hold them."""
    target.model.generation_config.update(**GenerationConfig._get_default_generation_params())  # type: ignore[union-attr]
    check_settings(target, Sampling())


@pytest.mark.parametrize("name", sorted(KNOWN & (CHANGING | FURTHER).keys()))
def test_fields_that_can_change_greedy_tokens_are_refused_by_name(target: Target, plain: list[int], name: str) -> None:
    _set(target, name, (CHANGING | FURTHER)[name])
    if name in CHANGING:
        # Some need what a checkpoint cannot give, such as a tokenizer or code from the hub.
        with contextlib.suppress(ValueError, TypeError):
            assert _generate(target) != plain
    for config in (PLAIN, LOOKUP):
        with pytest.raises(TargetError, match=rf"^target: generation_config\.{name}=.* null"):
            generate(target, PROMPT, config)
    # The caller's own generation configuration may ask for it, which is honoured or refused.
    with contextlib.suppress(ValueError, TypeError, ImportError):
        assert _generate(target, custom_generate=custom_generate(LOOKUP)) == _generate(target)


def test_every_field_of_the_installed_transformers_is_known() -> None:
    assert not KNOWN - HARMLESS.keys() - CHANGING.keys() - FURTHER.keys() - ELSEWHERE - {"repetition_penalty"}


def test_a_field_of_a_later_version_is_refused_and_one_that_generate_ignores_is_not(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later(GenerationConfig):
        def __init__(self) -> None:
            super().__init__()
            self.favoured_tokens = None

    _set(target, "favoured_tokens", [7])
    check_settings(target, Sampling())
    monkeypatch.setattr(checkpoint_settings, "GenerationConfig", Later)
    with pytest.raises(TargetError, match="generation_config.favoured_tokens="):
        check_settings(target, Sampling())


@pytest.mark.parametrize("config", [PLAIN, LOOKUP], ids=["plain", "lookup"])
def test_the_repetition_penalty_of_a_checkpoint_is_applied(
    target: Target, plain: list[int], config: SpeculativeConfig
) -> None:
    _set(target, "repetition_penalty", 3.0)
    expected = _generate(target)
    assert expected != plain
    for sampling in (None, Sampling(repetition_penalty=3.0)):
        assert generate(target, PROMPT, config, sampling=sampling, max_new_tokens=8).tokens == expected
    assert _generate(target, custom_generate=custom_generate(config)) == expected
    assert _generate(target, custom_generate=custom_generate(config), repetition_penalty=1.0) == plain
    with pytest.raises(TargetError, match=r"repetition_penalty=3.0 differs from sampling.repetition_penalty=1.2; set one"):
        generate(target, PROMPT, config, sampling=Sampling(0.7, repetition_penalty=1.2))


def test_a_measurement_applies_the_penalty(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_target.model.generation_config, "repetition_penalty", 1.5)
    assert measure(tiny_target, ["the thing"], LOOKUP, max_new_tokens=6).lossless.verdict == "exact"

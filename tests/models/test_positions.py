"""Scaled rotary positions compared with transformers' ``generate``: exact on both sides of a threshold, refused across."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from layerskip import SpeculativeConfig, Target, UnsupportedModel, generate
from tests.families import build
from tests.reference import generated

THRESHOLD = 24
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4,
    "original_max_position_embeddings": THRESHOLD,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LOOKUP = SpeculativeConfig("prompt_lookup", prompt_lookup_min=1, prompt_lookup_max=2, num_speculative_tokens=6)
SKIP = SpeculativeConfig("layer_skip", mask="attention:1", num_speculative_tokens=5)
TREE = SpeculativeConfig("token_recycling", num_speculative_tokens=3, min_token_prob=0.0)


def longrope_model() -> PreTrainedModel:
    return build("phi3", rope_parameters=LONG, original_max_position_embeddings=THRESHOLD)


def dynamic_model() -> PreTrainedModel:
    return build("llama", rope_parameters=DYNAMIC, max_position_embeddings=THRESHOLD)


def _prompt(length: int) -> list[int]:
    return [3 + 7 * place % 11 for place in range(length)]


@pytest.mark.parametrize("config", [SpeculativeConfig(), LOOKUP, SKIP, TREE], ids=lambda config: config.method)
@pytest.mark.parametrize("length", [THRESHOLD - 16, THRESHOLD + 1, THRESHOLD + 9])
def test_texts_on_one_side_of_the_threshold_equal_those_of_generate(config: SpeculativeConfig, length: int) -> None:
    model, prompt = longrope_model(), _prompt(length)
    assert generate(Target(model), prompt, config, max_new_tokens=16).tokens == generated(model, prompt, 16)


def test_a_text_that_may_cross_the_threshold_is_refused() -> None:
    model = longrope_model()
    with pytest.raises(UnsupportedModel, match=r"^max_new_tokens: Phi3ForCausalLM .* from 24 tokens on \(longrope\)"):
        generate(Target(model), _prompt(THRESHOLD - 15), LOOKUP, max_new_tokens=16)
    # Dynamic scaling is refused everywhere beyond its threshold.
    target = Target(dynamic_model())
    assert generate(target, _prompt(8), LOOKUP, max_new_tokens=16).tokens
    for length in (9, THRESHOLD + 9):
        with pytest.raises(UnsupportedModel, match=r"\(dynamic\)"):
            generate(target, _prompt(length), LOOKUP, max_new_tokens=16)


@pytest.mark.parametrize(
    ("family", "config"), [("gpt2", LOOKUP), ("gptj", SKIP), ("gptj", SpeculativeConfig())], ids=["gpt2", "gptj", "plain"]
)
def test_a_text_fills_a_table_of_positions_and_is_refused_beyond(family: str, config: SpeculativeConfig) -> None:
    """Learned, or of sines. The last token of an output needs no position, as in transformers."""
    model, prompt = build(family, max_position_embeddings=THRESHOLD), _prompt(8)
    assert generate(Target(model), prompt, config, max_new_tokens=17).tokens == generated(model, prompt, 17)
    with pytest.raises(UnsupportedModel, match="^max_new_tokens: 18 tokens after a prompt of 8 exceed the 24 positions"):
        generate(Target(model), prompt, config, max_new_tokens=18)
    with pytest.raises(UnsupportedModel, match="^prompt: 25 tokens exceed the 24 positions"):
        generate(Target(model), _prompt(25), config, max_new_tokens=1)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": THRESHOLD}


@pytest.mark.parametrize(("scaling", "stated"), [({}, THRESHOLD), ({"rope_parameters": YARN}, 2 * THRESHOLD)])
def test_a_prompt_beyond_the_stated_positions_is_warned_of_once(
    scaling: dict[str, Any], stated: int, caplog: pytest.LogCaptureFixture
) -> None:
    target = Target(build("llama", max_position_embeddings=THRESHOLD, **scaling))
    for length in (stated, stated + 1, stated + 2):
        assert generate(target, _prompt(length), LOOKUP, max_new_tokens=4).tokens
    (message,) = caplog.messages
    assert message == f"a prompt of {stated + 1} tokens exceeds the {stated} positions that LlamaForCausalLM states"

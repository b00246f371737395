"""Scaled rotary positions, against transformers' ``generate``: exact on either side of an edge, refused across it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import SpeculativeConfig, Target, UnsupportedModel, generate
from layerskip.models.positions import most_positions
from tests.families import build

EDGE = 24
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4,
    "original_max_position_embeddings": EDGE,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LOOKUP = SpeculativeConfig("prompt_lookup", ngram_min=1, ngram_max=2, draft_length=6)
SKIP = SpeculativeConfig("layer_skip", mask="attention:1", draft_length=5)
TREE = SpeculativeConfig("token_recycling", draft_length=3, least_probability=0.0)


def _long(**more: Any) -> PreTrainedModel:
    return build("phi3", rope_parameters=LONG, original_max_position_embeddings=EDGE, **more)


def _prompt(length: int) -> list[int]:
    return [3 + 7 * place % 11 for place in range(length)]


@pytest.mark.parametrize("config", [SpeculativeConfig(), LOOKUP, SKIP, TREE], ids=lambda config: config.kind)
@pytest.mark.parametrize("length", [EDGE - 16, EDGE + 1, EDGE + 9])
def test_texts_on_one_side_of_an_edge_are_those_of_generate(config: SpeculativeConfig, length: int) -> None:
    model, prompt = _long(), _prompt(length)
    tokens = torch.tensor([prompt], device=model.device)
    expected = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=16)
    found = generate(Target(model), prompt, config, max_new_tokens=16)
    assert found.tokens == expected[0, length:].tolist()


def test_a_text_that_may_cross_an_edge_is_refused_by_name() -> None:
    model = _long()
    with pytest.raises(UnsupportedModel, match=r"^max_new_tokens: Phi3ForCausalLM .* from 24 tokens on \(longrope\)"):
        generate(Target(model), _prompt(EDGE - 15), LOOKUP, max_new_tokens=16)
    # The edge is what makes it so: behind it, the tokens before it turn otherwise, too.
    other = _long()
    tokens = torch.tensor([_prompt(EDGE)], device=model.device)
    with torch.inference_mode():
        short, long = (
            m(torch.cat((tokens, tokens[:, :1]), 1)[:, :n]).logits[0, EDGE - 1]
            for m, n in ((model, EDGE), (other, EDGE + 1))
        )
    assert not torch.allclose(short, long, atol=1e-4)


def test_dynamic_scaling_is_refused_behind_its_edge_for_good() -> None:
    target = Target(build("llama", rope_parameters=DYNAMIC, max_position_embeddings=EDGE))
    assert generate(target, _prompt(8), LOOKUP, max_new_tokens=16).tokens
    for length in (9, EDGE + 9):
        with pytest.raises(UnsupportedModel, match=r"\(dynamic\)"):
            generate(target, _prompt(length), LOOKUP, max_new_tokens=16)


def test_positions_that_are_learnt_end() -> None:
    assert most_positions(build("gpt2")) == 256
    assert most_positions(build("llama")) is None

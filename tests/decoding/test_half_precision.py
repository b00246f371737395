"""Decoding in half precision: transformers' own tokens, except where rounding decides between equally likely ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layerskip import Sampling, SpeculativeConfig, Target, generate, load_target
from layerskip.measure.losslessness import find_divergence
from tests.accelerator import DEVICE
from tests.drafters.contract import greedy_tokens
from tests.tiny import save_tiny

LENGTH = 24
PROMPTS = ([7, 8, 9, 7, 8, 9, 7, 8, 10], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51], [200])
CONFIGS: dict[str, dict[str, Any]] = {
    "none": {},
    "prompt_lookup": {"prompt_lookup_min": 1},
    "layer_skip": {"mask": "attention:1;mlp:2", "num_speculative_tokens": 3},
    "token_recycling": {"min_token_prob": 0.0},
    "retrieval": {"min_token_prob": 0.0},
    "lookahead": {"window": 2, "num_speculative_tokens": 2},
    "cascade": {"members": [{"method": "prompt_lookup"}, {"method": "layer_skip", "mask": "layers:1"}]},
}


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("half") / request.param, request.param, idle=[1])


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def target(request: pytest.FixtureRequest, folder: Path) -> Target:
    return load_target(str(folder), dtype=request.param, device=DEVICE)


@pytest.fixture(scope="module")
def expected(target: Target) -> list[list[int]]:
    """The new tokens of transformers' own greedy ``generate`` after each prompt."""
    return [greedy_tokens(target, prompt, max_new_tokens=LENGTH, eos_token_id=None) for prompt in PROMPTS]


@pytest.mark.parametrize("method", CONFIGS)
def test_outputs_differ_at_near_ties_only(target: Target, expected: list[list[int]], method: str) -> None:
    config = SpeculativeConfig.from_dict({"method": method} | CONFIGS[method])
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        found = generate(target, prompt, config, max_new_tokens=LENGTH)
        divergence = find_divergence(target, "p", prompt, tokens, found.tokens, Sampling())
        assert divergence is None or divergence.near_tie
        assert method not in ("layer_skip", "cascade") or found.stats.mean_acceptance_length > 1

"""Attention on grouped heads gives what transformers' own attention gives, and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch

from layerskip.cache import KVCache
from layerskip.forward import forward
from layerskip.view import decoding_view
from tests.families import build


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mistral", "glm4", "gpt_oss", "phi", "gemma2"])
@pytest.mark.parametrize("length", [12, 40])
def test_a_block_behind_a_prefix_equals_a_pass_without_any_cache(family: str, length: int) -> None:
    model = build(family)
    implementation = model.config._attn_implementation
    tokens = torch.randint(3, 60, (length + 6,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = model(input_ids=tokens[None]).logits[0, -6:]
        view = decoding_view(model)
        cache = KVCache(model.config.num_hidden_layers, length + 6)
        forward(view, tokens[:length], cache, last=1)
        cache.length = length
        block = forward(view, tokens[length:], cache, last=6)
    torch.testing.assert_close(block, expected, atol=1e-4, rtol=1e-4)
    assert model.config._attn_implementation == implementation


def test_a_view_is_made_once_and_goes_with_its_model() -> None:
    model = build("llama")
    assert decoding_view(model) is decoding_view(model)
    assert decoding_view(model).lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()

"""Grouped attention reads no more keys than it needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerskip.models import attention
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
from layerskip.models.skip_view import decoding_view
from tests.accelerator import DEVICE
from tests.families import build

ATTEND = torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize("count", [1, 6, 70])
def test_layers_with_a_window_read_no_keys_before_it(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of 8 of the first of 6 queries begins 7 keys before it."""
    model, tokens = build("mistral", sliding_window=8), torch.arange(3, 103 + 3 + count).to(DEVICE) % 60
    view, cache = decoding_view(model), KVCache(model.config.num_hidden_layers, len(tokens), device=DEVICE)
    read: list[int] = []

    def attend(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        read.append(key.shape[2])
        return ATTEND(query, key, *args, **kwargs)

    for module in (attention, torch.nn.functional):  # transformers uses the second one
        monkeypatch.setattr(module, "scaled_dot_product_attention", attend)
    with torch.inference_mode():
        forward(view, tokens[:100], cache, last=1)
        cache.length, _ = 100, read.clear()
        forward(view, tokens[100 : 100 + count], cache, last=1)
    assert set(read) == {7 + count}


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_cache_of_transformers_that_drops_keys_is_read_whole(family: str) -> None:
    model, tokens = build(family), torch.arange(3, 43).to(DEVICE)[None]
    with torch.inference_mode():
        expected = model(input_ids=tokens).logits[0, -3:]
        view = decoding_view(model)
        cache = view(input_ids=tokens[:, :-3], use_cache=True).past_key_values
        block = view(input_ids=tokens[:, -3:], past_key_values=cache).logits[0]
    torch.testing.assert_close(block, expected, atol=1e-4, rtol=1e-4)

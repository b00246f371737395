"""Grouped attention reads no more keys than it needs, and has the gradients of exact attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("count", [5, 80])
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_are_those_of_exact_attention(groups: int, count: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (6, count, 16), (groups, 90, 16), (groups, 90, 16)
    states = [torch.randn(1, *shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]
    seen = torch.rand(1, 1, count, 90, generator=generator) < 0.5
    seen[..., 0] = True
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.bfloat16).min).bfloat16()
    upstream = torch.randn(1, count, 6, 16, generator=generator)

    attend = ALL_ATTENTION_FUNCTIONS[attention.NAME]
    actual, _ = attend(torch.nn.Module(), *states, bias if biased else seen, scaling=0.3)
    actual.backward(upstream.bfloat16())

    query, key, value = (part.detach().double().requires_grad_() for part in states)
    wide = [part.repeat_interleave(6 // groups, 1) for part in (key, value)]
    scores = (query @ wide[0].transpose(-1, -2) * 0.3).masked_fill(~seen, -float("inf"))
    expected = (scores.softmax(-1) @ wide[1]).transpose(1, 2)
    expected.backward(upstream.double())
    torch.testing.assert_close(actual.double(), expected, atol=0.03, rtol=0.03)
    for part, exact in zip(states, (query, key, value), strict=True):
        assert part.grad is not None
        assert exact.grad is not None
        assert (part.grad - exact.grad).norm() < 0.02 * exact.grad.norm()

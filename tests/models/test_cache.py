"""The key-value cache: one length for all layers, rewound by assignment, also past sliding windows; which keys are read."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip.models import attention
from layerskip.models.cache import CacheOverflow, KVCache
from layerskip.models.forward import forward
from layerskip.models.skip_view import decoding_view
from tests.accelerator import DEVICE
from tests.families import build
from tests.models.passes import assert_close, fresh, let_token_63_overflow, tokens_of

LENGTH = 100  # many times the sliding windows of tests.families
SHAPES = pytest.mark.parametrize("static_shapes", [False, True], ids=["dynamic", "static"])
_assert_close = partial(assert_close, tolerance=1e-5)


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma3_text"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


def _cache(model: PreTrainedModel, static_shapes: bool = False, length: int = LENGTH) -> KVCache:
    return KVCache(model.config.num_hidden_layers, length, static_shapes, DEVICE)


@SHAPES
@torch.inference_mode()
def test_a_rewind_leaves_no_trace(model: PreTrainedModel, static_shapes: bool) -> None:
    """Committed positions, more than a window of them, are rewound and written again."""
    tokens, cache, target = tokens_of(LENGTH), _cache(model, static_shapes), decoding_view(model)
    forward(target, tokens, cache, last=1)
    cache.length = LENGTH
    for kept in (LENGTH - 3, 13, 0):
        cache.length = kept
        rewritten = torch.cat((tokens[:kept], tokens_of(LENGTH, kept + 1)[kept:]))
        expected = fresh(model, rewritten)
        _assert_close(forward(target, rewritten[kept : kept + 2], cache, last=2), expected[kept : kept + 2])
        cache.length = kept + 2
        _assert_close(forward(target, rewritten[kept + 2 :], cache, last=1), expected[-1:])
        cache.length = LENGTH


@SHAPES
@torch.inference_mode()
def test_positions_beyond_the_buffers_are_refused(model: PreTrainedModel, static_shapes: bool) -> None:
    tokens, cache, target = tokens_of(LENGTH), _cache(model, static_shapes, length=10), decoding_view(model)
    forward(target, tokens[:10], cache, last=1)
    cache.length = 8
    with pytest.raises(IndexError, match="^cache: "):
        forward(target, tokens[8:11], cache, last=1)
    for length in (-1, 11):
        with pytest.raises(IndexError, match=f"length {length} .* 0 to 10"):
            cache.length = length
    assert cache.length == 8
    _assert_close(forward(target, tokens[8:10], cache, last=2), fresh(model, tokens[:10])[8:])


@SHAPES
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@torch.inference_mode()
def test_a_copied_overflow_of_float16_is_refused(static_shapes: bool, dtype: torch.dtype) -> None:
    """The positions before it can be copied."""
    model, tokens = build("llama").to(dtype), tokens_of(8) % 63
    let_token_63_overflow(model)
    tokens[5] = 63
    source, cache = _cache(model), _cache(model, static_shapes)
    for part in (tokens[:5], tokens[5:]):  # in one pass, the overflow times 0 would spoil the positions before it
        forward(decoding_view(model), part, source, last=1)
        source.length += len(part)
    cache.copy_from([(source, 5)])
    assert cache.length == 5
    overflows = pytest.raises(CacheOverflow, match=r"^target\.dtype: float16 overflows [^\n]*$")
    with overflows if dtype == torch.float16 else nullcontext():
        cache.copy_from([(source, 2), (source, 6)])


@SHAPES
@torch.inference_mode()
def test_memory_is_allocated_once(static_shapes: bool) -> None:
    target = build("llama")
    config, cache, tokens = target.config, _cache(target, static_shapes), tokens_of(LENGTH)
    assert cache.nbytes == 0
    addresses = []
    for start, end in ((0, 3), (3, LENGTH), (0, LENGTH)):
        cache.length = start
        forward(target, tokens[start:end], cache, last=1)
        addresses.append([states.data_ptr() for states in cache.buffers()])
    assert addresses[0] == addresses[1] == addresses[2]
    assert cache.nbytes == 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * LENGTH * config.head_dim


@pytest.mark.parametrize("count", [1, 6, 70])
def test_layers_with_a_window_read_no_keys_before_it(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of 8 of the first of 6 queries begins 7 keys before it."""
    model, tokens = build("mistral", sliding_window=8), tokens_of(LENGTH + count)
    view, cache = decoding_view(model), _cache(model, length=len(tokens))
    read: list[int] = []
    compute = torch.nn.functional.scaled_dot_product_attention

    def attend(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        read.append(key.shape[2])
        return compute(query, key, *args, **kwargs)

    for module in (attention, torch.nn.functional):  # transformers uses the second one
        monkeypatch.setattr(module, "scaled_dot_product_attention", attend)
    with torch.inference_mode():
        forward(view, tokens[:LENGTH], cache, last=1)
        cache.length, _ = LENGTH, read.clear()
        forward(view, tokens[LENGTH:], cache, last=1)
    assert set(read) == {7 + count}


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_cache_of_transformers_that_drops_keys_is_read_whole(family: str) -> None:
    model, tokens = build(family), tokens_of(40)[None]
    view, expected = decoding_view(model), fresh(model, tokens[0])[-3:]
    with torch.inference_mode():
        cache = view(input_ids=tokens[:, :-3], use_cache=True).past_key_values
        block = view(input_ids=tokens[:, -3:], past_key_values=cache).logits[0]
    torch.testing.assert_close(block, expected, atol=1e-4, rtol=1e-4)

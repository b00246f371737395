"""The key-value cache: one length for all layers, rewound by assignment, also past sliding windows."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from layerskip.models.cache import CacheFull, CacheOverflow, KVCache
from layerskip.models.forward import forward
from layerskip.models.skip_view import decoding_view
from tests.accelerator import DEVICE
from tests.families import build
from tests.models.passes import assert_close, tokens_of

FAMILIES = ("llama", "gpt2", "gemma3_text", "mistral")
WINDOW = 8  # of every sliding-window layer in tests.families
LENGTH = 100
SHAPES = pytest.mark.parametrize("static_shapes", [False, True], ids=["dynamic", "static"])


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


def _fresh(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """``[n, V]``: one pass without a cache."""
    with torch.inference_mode():
        return model(input_ids=tokens[None], use_cache=False).logits[0]


_assert_close = partial(assert_close, tolerance=1e-5)


def _cache(model: PreTrainedModel, static_shapes: bool = False, length: int = LENGTH) -> KVCache:
    return KVCache(model.config.num_hidden_layers, length, static_shapes, DEVICE)


@pytest.fixture
def target(model: PreTrainedModel) -> PreTrainedModel:
    """The view that the decoding loop runs; its logits must equal the model's."""
    return decoding_view(model)


@SHAPES
@torch.inference_mode()
def test_blocks_of_any_size_give_the_logits_of_one_pass(
    model: PreTrainedModel, target: PreTrainedModel, static_shapes: bool
) -> None:
    tokens, cache = tokens_of(LENGTH), _cache(model, static_shapes)
    expected = _fresh(model, tokens)
    for size, last in ((5, 5), (1, 1), (1, 1), (80, 4), (3, 1), (10, 10)):
        start = cache.length
        actual = forward(target, tokens[start : start + size], cache, last)
        assert cache.length == cache.get_seq_length() == start  # a pass never changes it
        cache.length += size
        _assert_close(actual, expected[cache.length - last : cache.length])
    assert cache.length == LENGTH


@SHAPES
@torch.inference_mode()
def test_a_rewind_leaves_no_trace(model: PreTrainedModel, target: PreTrainedModel, static_shapes: bool) -> None:
    """Committed positions, more than a window of them, are rewound and written again."""
    tokens, cache = tokens_of(LENGTH), _cache(model, static_shapes)
    forward(target, tokens, cache, last=1)
    cache.length = LENGTH
    for kept in (LENGTH - 3, 13, 2, 0):
        cache.length = kept
        rewritten = torch.cat((tokens[:kept], tokens_of(LENGTH, kept + 1)[kept:]))
        expected = _fresh(model, rewritten)
        _assert_close(forward(target, rewritten[kept : kept + 2], cache, last=2), expected[kept : kept + 2])
        cache.length = kept + 2
        _assert_close(forward(target, rewritten[kept + 2 :], cache, last=1), expected[-1:])
        cache.length = LENGTH


@SHAPES
@torch.inference_mode()
def test_writing_past_the_last_position_is_refused(
    model: PreTrainedModel, target: PreTrainedModel, static_shapes: bool
) -> None:
    tokens, cache = tokens_of(LENGTH), _cache(model, static_shapes, length=10)
    forward(target, tokens[:10], cache, last=1)
    cache.length = 8
    with pytest.raises(CacheFull, match="^cache: "):
        forward(target, tokens[8:11], cache, last=1)
    _assert_close(forward(target, tokens[8:10], cache, last=2), _fresh(model, tokens[:10])[8:])


@SHAPES
def test_a_length_outside_the_buffers_is_refused(static_shapes: bool) -> None:
    cache = KVCache(2, 10, static_shapes)
    cache.length = 10
    for length in (-1, 11):
        with pytest.raises(CacheFull, match=f"length {length} .* 0 to 10"):
            cache.length = length
    assert cache.length == 10


@SHAPES
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@torch.inference_mode()
def test_a_copied_overflow_of_float16_is_refused(static_shapes: bool, dtype: torch.dtype) -> None:
    """Values of token 63 are beyond the range of float16. The positions before it can be copied."""
    model, tokens = build("llama").to(dtype), tokens_of(8) % 63
    words, values = model.get_input_embeddings().weight, model.model.layers[0].self_attn.v_proj.weight
    words[:, 0], values[:, 0], words[63], tokens[5] = 0.0, 6e4, torch.eye(32, dtype=dtype)[0], 63
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
    forward(target, tokens[:3], cache, last=1)
    buffers = [states.data_ptr() for layer in cache.layers for states in (layer.keys, layer.values)]
    positions = 2 * config.num_hidden_layers * config.num_key_value_heads * LENGTH
    assert cache.nbytes == positions * config.head_dim * 4
    cache.length = 3
    forward(target, tokens[3:], cache, last=1)
    cache.length = 0
    forward(target, tokens, cache, last=1)
    assert buffers == [states.data_ptr() for layer in cache.layers for states in (layer.keys, layer.values)]


@torch.inference_mode()
def test_static_shapes_read_positions_from_the_device() -> None:
    """A captured graph replays with the present value of the position tensor, not with the captured one."""
    cache = KVCache(1, 10, static_shapes=True)
    position = cache.position
    assert isinstance(position, Tensor)
    cache.length = 6
    assert cache.position is position and int(position) == 6
    assert cache.positions(3).tolist() == [6, 7, 8]
    cache.length = 2
    assert cache.position is position and int(position) == 2

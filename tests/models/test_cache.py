"""The key-value cache: one length for all layers, rewound by assignment; a pool gives each cache one user at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from layerskip.decoding.drafter import NoDraft
from layerskip.decoding.sampling import Sampling
from layerskip.device.memory import release_memory
from layerskip.models import attention, cache_pool
from layerskip.models.cache import CacheOverflow, KVCache
from layerskip.models.cache_pool import acquire_cache, release_cache
from layerskip.models.forward import forward
from layerskip.models.graph_capture import CapturingCache
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target
from tests.accelerator import DEVICE, decode_static
from tests.families import build
from tests.models.passes import LAYERS, TORCH_DEVICE, acquired, assert_close, fresh, let_token_63_overflow, tokens_of

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


def test_a_cache_has_one_user_at_a_time_and_is_reused() -> None:
    model = build("llama")
    first, second = acquired(model), acquired(model)
    assert first is not second
    first.length = 7
    release_cache(model, first)
    again = acquired(model, 50)
    assert again is first and (again.length, again.capacity) == (0, 50)
    release_cache(model, again)
    release_cache(model, again)  # a second release is harmless
    assert acquired(model) is first
    assert acquired(model) is not first
    assert acquired(build("llama", 1)) is not first
    plain = acquire_cache(model, LAYERS, 40, TORCH_DEVICE, static_shapes=False)
    assert type(plain) is KVCache and plain.max_length == 40
    release_cache(model, plain)
    assert acquire_cache(model, LAYERS, 40, TORCH_DEVICE, static_shapes=False) is not plain


@torch.inference_mode()
def test_a_reused_cache_has_nothing_of_an_earlier_text() -> None:
    """Masked positions are read too, and NaN times 0 is NaN."""
    model = build("llama")
    view, outputs = decoding_view(model), []
    for reused in (False, True):
        cache = acquired(model)
        assert bool(cache.buffers()) == reused
        for _ in range(2):
            forward(view, tokens_of(8), cache, last=1)
            cache.length = 8
            outputs.append(forward(view, tokens_of(1), cache, last=1))
        for states in cache.buffers():
            states[:, :, 20:] = float("nan")
        release_cache(model, cache)
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def _leave(model: PreTrainedModel) -> None:
    """Even if nothing is captured on the new device."""
    acquire_cache(model, LAYERS, 40, torch.device("meta"), static_shapes=False)


@pytest.mark.parametrize("change", [lambda model: model.double(), _leave, lambda model: release_memory()])
def test_a_cache_is_not_reused_for_other_weights_or_when_memory_was_short(change: Callable[[PreTrainedModel], None]) -> None:
    model = build("llama")
    first = acquired(model)
    release_cache(model, first)
    change(model)
    assert acquired(model) is not first


def test_a_cache_depends_on_all_weights_that_passes_read() -> None:
    model, module = build("llama"), nn.Linear(2, 2)
    take = partial(acquire_cache, model, LAYERS, 40, TORCH_DEVICE, static_shapes=True, reads=[module])
    first = take()
    release_cache(model, first)
    assert take() is first
    release_cache(model, first)
    module.weight.data = module.weight.data.clone()
    assert take() is not first
    # Nothing is captured where moved weights could not be detected.
    assert type(acquire_cache(nn.Linear(2, 2, device="meta"), 1, 40, TORCH_DEVICE, static_shapes=True)) is KVCache


def test_passes_are_captured_on_a_gpu_unless_the_context_is_long(caplog: pytest.LogCaptureFixture) -> None:
    """A long one is decoded all the same, and logged once; where nothing is captured, no length is too long."""
    model = build("llama")
    assert isinstance(acquire_cache(model, LAYERS, 40, TORCH_DEVICE), CapturingCache) == (TORCH_DEVICE.type == "cuda")
    for static_shapes in (False, True, True):
        assert type(acquire_cache(model, LAYERS, 131_073, TORCH_DEVICE, static_shapes)) is KVCache
    reason = "a text may have 131073 tokens, more than 131072; its passes are neither captured nor compiled"
    assert caplog.messages == [f"LlamaForCausalLM: {reason}"]


def test_long_caches_are_hardly_longer_than_requested_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free ones may take an eighth of the memory; the latest is kept in any case."""
    model = build("llama")
    for positions in (4097, 4608, 8193, 20_000, 32_768, 131_072):
        assert positions <= acquired(model, positions).max_length <= positions * 9 / 8
    monkeypatch.setattr(CapturingCache, "nbytes", property(lambda cache: cache.max_length))
    monkeypatch.setattr(cache_pool, "device_bytes", lambda device: 8 * 65_536)
    short, middle, long = (acquired(model, positions) for positions in (40, 40_000, 100_000))
    for cache in (short, middle, long):
        release_cache(model, cache)
    assert cache_pool._free[model] == [long]
    release_cache(model, short)
    release_cache(model, middle)
    assert cache_pool._free[model] == [middle, short]


def test_a_holder_keeps_one_cache_until_it_is_collected() -> None:
    """It can be collected while another one acquires a cache."""
    model, holder, other = build("llama"), nn.Identity(), nn.Identity()
    first = acquired(model, holder=holder)
    assert acquired(model, holder=other) is not first
    assert acquired(model, holder=holder) is first  # the first cache was released for it
    with cache_pool._lock:
        del holder
        gc.collect()
    assert acquired(model) is first
    assert acquired(model) is not first


def test_captured_passes_survive_an_interrupted_request_of_which_no_trace_is_left() -> None:
    target = Target(build("llama"))

    def interrupt(tokens: list[int]) -> None:
        if len(tokens) < 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode_static(target, NoDraft(), [5, 9, 3, 7], Sampling(), 8, callback=interrupt)
    (cache,) = cache_pool._free[target.model]
    with torch.inference_mode():
        cache.length = 7
        cache._on_device().fill_(9)  # as if the interrupt had come within a pass
        cache.static_shapes = True
        assert acquired(target.model) is cache
        cache.length = 7
        assert not cache.static_shapes and int(cache._on_device()) == 7

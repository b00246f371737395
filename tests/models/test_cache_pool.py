"""The cache pool: a cache has one user at a time and is reused while its captured passes are valid."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from layerskip.decoding.drafter import NoDraft
from layerskip.decoding.sampling import Sampling
from layerskip.device.memory import release_memory
from layerskip.models import cache_pool
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache, release_cache
from layerskip.models.forward import forward
from layerskip.models.graph_capture import CapturingCache
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target
from tests.accelerator import decode_static
from tests.families import build
from tests.models.passes import LAYERS, TORCH_DEVICE, acquired, tokens_of


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

"""The cache pool: a cache has one user at a time and is reused while its captured passes are valid."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.config import StopRule
from layerskip.decoding.drafter import NoDraft
from layerskip.decoding.sampling import Sampling
from layerskip.device.memory import release_memory
from layerskip.drafters.draft_model import DraftModel
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

PROMPT = [5, 9, 3, 7]


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
    assert acquired(model, first.max_length + 1).max_length > first.max_length


def test_a_cache_without_captures_has_the_requested_length_and_is_not_reused() -> None:
    model = build("llama")
    cache = acquire_cache(model, LAYERS, 40, TORCH_DEVICE, static_shapes=False)
    assert type(cache) is KVCache and cache.max_length == 40
    release_cache(model, cache)
    assert acquire_cache(model, LAYERS, 40, TORCH_DEVICE, static_shapes=False) is not cache


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


def _to_float64(model: PreTrainedModel) -> None:
    model.to(torch.float64)


def _move(model: PreTrainedModel) -> None:
    """Even if nothing is captured on the new device."""
    acquire_cache(model, LAYERS, 40, torch.device("meta"), static_shapes=False)


@pytest.mark.parametrize("change", [_to_float64, _move, lambda model: release_memory()])
def test_a_cache_is_not_reused_for_other_weights_or_when_memory_was_short(change: Callable[[PreTrainedModel], None]) -> None:
    model = build("llama")
    first = acquired(model)
    release_cache(model, first)
    change(model)
    assert acquired(model) is not first


def test_passes_are_captured_on_a_gpu_unless_the_context_is_long(caplog: pytest.LogCaptureFixture) -> None:
    """A long one is decoded all the same, and logged once; where nothing is captured, no length is too long."""
    model = build("llama")
    assert isinstance(acquire_cache(model, LAYERS, 40, TORCH_DEVICE), CapturingCache) == (TORCH_DEVICE.type == "cuda")
    for static_shapes in (False, True, True):
        assert type(acquire_cache(model, LAYERS, 131_073, TORCH_DEVICE, static_shapes)) is KVCache
    (record,) = caplog.records
    reason = "a text may have 131073 tokens, more than 131072; its passes are neither captured nor compiled"
    assert record.getMessage() == f"LlamaForCausalLM: {reason}"


def test_large_free_caches_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may take an eighth of the memory; the latest is kept in any case."""
    monkeypatch.setattr(CapturingCache, "nbytes", property(lambda cache: cache.max_length))
    monkeypatch.setattr(cache_pool, "device_bytes", lambda device: 8 * 131_072)
    model = build("llama")
    caches = [acquired(model, positions) for positions in (40, 100_000, 40_000, 40)]
    for cache in caches:
        release_cache(model, cache)
    short, middle, long, _ = reversed(caches)
    assert cache_pool._free[model] == [short, middle]
    release_cache(model, long)
    assert cache_pool._free[model] == [long, short]
    monkeypatch.setattr(cache_pool, "device_bytes", lambda device: 0)
    release_cache(model, long)
    assert cache_pool._free[model] == [long]


def test_a_long_cache_is_at_max_an_eighth_longer_than_requested() -> None:
    """Passes read masked positions too. There are few lengths, so that most prompts find a pooled cache."""
    for positions in (4097, 4608, 4609, 8192, 8193, 20_000, 32_768, 100_000, 131_072):
        length = acquired(build("llama"), positions).max_length
        assert positions <= length <= positions * 9 / 8
        assert length % 512 == 0


def test_a_cache_depends_on_all_weights_that_passes_read() -> None:
    model, module = build("llama"), nn.Linear(2, 2)
    take = partial(acquire_cache, model, LAYERS, 40, TORCH_DEVICE, static_shapes=True, reads=[module])
    first = take()
    release_cache(model, first)
    assert take() is first
    release_cache(model, first)
    module.weight.data = module.weight.data.clone()
    assert take() is not first


class _Wrapped(Tensor):
    """A tensor that wraps another one, as quantised ones do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].inner)  # called by nn.Parameter


def test_nothing_is_captured_if_moved_weights_cannot_be_detected() -> None:
    model = nn.Linear(2, 2)
    assert isinstance(acquire_cache(model, 1, 40, TORCH_DEVICE, static_shapes=True), CapturingCache)
    model.weight = nn.Parameter(_Wrapped(torch.ones(2, 2)), requires_grad=False)
    assert type(acquire_cache(model, 1, 40, TORCH_DEVICE, static_shapes=True)) is KVCache


class _Holder:
    pass


def test_a_holder_keeps_one_cache_until_it_is_collected() -> None:
    """It can be collected while another one acquires a cache."""
    model, holder, other = build("llama"), _Holder(), _Holder()
    first = acquired(model, holder=holder)
    assert acquired(model, holder=other) is not first
    assert acquired(model, holder=holder) is first  # the first cache was released for it
    with cache_pool._lock:
        del holder
        gc.collect()
    assert acquired(model) is first
    assert acquired(model) is not first


def test_the_cache_of_a_collected_drafter_is_reused() -> None:
    target, draft = Target(build("llama")), build("llama", 1)
    drafter = DraftModel(draft, LAYERS, 2, StopRule())
    decode_static(target, drafter, PROMPT, Sampling(), 8)
    first = drafter._cache
    del drafter
    gc.collect()
    assert acquired(draft) is first


def test_captured_passes_survive_an_interrupted_request() -> None:
    target = Target(build("llama"))

    def interrupt(tokens: list[int]) -> None:
        if len(tokens) < 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode_static(target, NoDraft(), PROMPT, Sampling(), 8, callback=interrupt)
    assert any(type(cache) is CapturingCache for cache in cache_pool._free[target.model])


def test_an_interrupted_pass_leaves_no_trace() -> None:
    """Static shapes and the length on the device are reset."""
    model = build("llama")
    cache = acquired(model)
    with torch.inference_mode():
        cache.length = 7
        cache._on_device().fill_(9)
        cache.static_shapes = True
    release_cache(model, cache)
    assert acquired(model) is cache
    cache.length = 7
    assert not cache.static_shapes and int(cache._on_device()) == 7

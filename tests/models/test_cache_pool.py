"""The cache pool: a cache has one user at a time and is reused while its captured passes are valid."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
from tests.accelerator import DEVICE, decode_static
from tests.families import build

LAYERS = 4
TORCH_DEVICE = torch.device(DEVICE)
PROMPT = [5, 9, 3, 7]


def _tokens(count: int) -> Tensor:
    return torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def _acquired(model: Any, positions: int = 40, holder: object | None = None) -> CapturingCache:
    cache = acquire_cache(model, LAYERS, positions, model.device, static_shapes=True, holder=holder)
    assert isinstance(cache, CapturingCache)
    return cache


def test_a_cache_has_one_user_at_a_time_and_is_reused() -> None:
    model = build("llama")
    first, second = _acquired(model), _acquired(model)
    assert first is not second
    first.length = 7
    release_cache(model, first)
    again = _acquired(model, 50)
    assert again is first and (again.length, again.capacity) == (0, 50)
    release_cache(model, again)
    release_cache(model, again)  # a second release is harmless
    assert _acquired(model) is first
    assert _acquired(model) is not first
    assert _acquired(build("llama", 1)) is not first
    assert _acquired(model, first.max_length + 1).max_length > first.max_length


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
        cache = _acquired(model)
        assert cache.is_written == reused
        for _ in range(2):
            forward(view, _tokens(8), cache, last=1)
            cache.length = 8
            outputs.append(forward(view, _tokens(1), cache, last=1))
        for states in (part for layer in cache.states() for part in layer if part is not None):
            states[:, :, 20:] = float("nan")
        release_cache(model, cache)
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_a_cache_for_other_weights_is_not_reused() -> None:
    model = build("llama")
    first = _acquired(model)
    release_cache(model, first)
    model.to(torch.float64)
    assert _acquired(model) is not first


def test_pooled_caches_are_freed_when_memory_is_short() -> None:
    model = build("llama")
    first = _acquired(model)
    release_cache(model, first)
    release_memory()
    assert _acquired(model) is not first


def test_passes_are_captured_on_a_gpu_unless_the_context_is_long() -> None:
    model = build("llama")
    assert isinstance(acquire_cache(model, LAYERS, 40, TORCH_DEVICE), CapturingCache) == (TORCH_DEVICE.type == "cuda")
    assert type(acquire_cache(model, LAYERS, 200_000, TORCH_DEVICE)) is KVCache


def test_a_context_that_is_too_long_to_be_captured_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """It is decoded all the same; without captured passes, as on a CPU by default, no length is too long."""
    model = build("llama")
    assert type(acquire_cache(model, LAYERS, 131_073, TORCH_DEVICE, static_shapes=False)) is KVCache
    assert not caplog.records
    for _ in range(2):
        assert type(acquire_cache(model, LAYERS, 131_073, TORCH_DEVICE, static_shapes=True)) is KVCache
    (record,) = caplog.records
    expected = (
        "LlamaForCausalLM: a text may have 131073 tokens, more than 131072; its passes are neither captured nor compiled"
    )
    assert record.getMessage() == expected


def test_long_free_caches_are_not_all_kept() -> None:
    """Four of 32768 positions are, so the longest cache is kept alone."""
    model = build("llama")
    caches = [_acquired(model, positions) for positions in (40, 100_000, 40_000, 40)]
    for cache in caches:
        release_cache(model, cache)
    short, middle, long, _ = reversed(caches)
    assert cache_pool._free[model] == [short, middle]
    release_cache(model, long)
    assert cache_pool._free[model] == [long, short]
    whole = _acquired(model, 131_072)
    release_cache(model, whole)
    assert cache_pool._free[model] == [whole]


@pytest.mark.parametrize("positions", [4097, 4608, 4609, 8192, 8193, 20_000, 32_768, 100_000, 131_072])
def test_a_long_cache_is_at_max_an_eighth_longer_than_requested(positions: int) -> None:
    """Passes read masked positions too. There are few lengths, so that most prompts find a pooled cache."""
    length = _acquired(build("llama"), positions).max_length
    assert positions <= length <= positions * 9 / 8
    assert length % 512 == 0


def test_pooled_caches_are_dropped_when_the_model_moves() -> None:
    """Even if nothing is captured on the new device."""
    model = build("llama")
    first = _acquired(model)
    release_cache(model, first)
    acquire_cache(model, LAYERS, 40, torch.device("meta"), static_shapes=False)
    assert _acquired(model) is not first


def test_a_cache_depends_on_all_weights_that_passes_read() -> None:
    model, module = build("llama"), nn.Linear(2, 2)

    def acquired() -> KVCache:
        return acquire_cache(model, LAYERS, 40, model.device, static_shapes=True, reads=[module])

    first = acquired()
    release_cache(model, first)
    assert acquired() is first
    release_cache(model, first)
    module.weight.data = module.weight.data.clone()
    assert acquired() is not first


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
    model, holder, other = build("llama"), _Holder(), _Holder()
    first = _acquired(model, holder=holder)
    assert _acquired(model, holder=other) is not first
    assert _acquired(model, holder=holder) is first  # the first cache was released for it
    del holder
    gc.collect()
    assert _acquired(model) is first
    assert _acquired(model) is not first


def test_the_cache_of_a_collected_drafter_is_reused() -> None:
    target, draft = Target(build("llama")), build("llama", 1)
    drafter = DraftModel(draft, LAYERS, 2, StopRule())
    decode_static(target, drafter, PROMPT, Sampling(), 8)
    first = drafter._cache
    del drafter
    gc.collect()
    assert _acquired(draft) is first


def test_a_cache_can_be_released_while_another_is_acquired() -> None:
    """A holder can be collected at any time."""
    with cache_pool._lock:
        free = cache_pool._lock.acquire(blocking=False)
    assert free
    cache_pool._lock.release()


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
    cache = _acquired(model)
    with torch.inference_mode():
        cache.length = 7
        cache._on_device().fill_(9)
        cache.static_shapes = True
    release_cache(model, cache)
    assert _acquired(model) is cache
    cache.length = 7
    assert not cache.static_shapes and int(cache._on_device()) == 7

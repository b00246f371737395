"""A cache is lent to one at a time, again and again, for as long as what was recorded on it holds."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerskip.config import StopRule
from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import NoDraft
from layerskip.decoding.sampling import Sampling
from layerskip.device.memory import release
from layerskip.drafters.draft_model import DraftModel
from layerskip.models import cache_pool as lending
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache, release_cache
from layerskip.models.forward import forward
from layerskip.models.graph_capture import RecordedCache
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target
from tests.accelerator import DEVICE
from tests.families import build

LAYERS = 4
PLACE = torch.device(DEVICE)
PROMPT = [5, 9, 3, 7]


def _tokens(count: int) -> Tensor:
    return torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def _lent(model: Any, positions: int = 40, holder: object | None = None) -> RecordedCache:
    cache = acquire_cache(model, LAYERS, positions, model.device, static_shapes=True, holder=holder)
    assert isinstance(cache, RecordedCache)
    return cache


def test_a_cache_is_lent_to_one_at_a_time_and_then_again() -> None:
    model = build("llama")
    first, second = _lent(model), _lent(model)
    assert first is not second
    first.length = 7
    release_cache(model, first)
    again = _lent(model, 50)
    assert again is first and (again.length, again.room) == (0, 50)
    release_cache(model, again)
    release_cache(model, again)  # twice by mistake
    assert _lent(model) is first
    assert _lent(model) is not first
    assert _lent(build("llama", 1)) is not first
    assert _lent(model, first.max_length + 1).max_length > first.max_length


def test_a_cache_that_records_nothing_is_as_long_as_asked_for_and_never_lent_again() -> None:
    model = build("llama")
    cache = acquire_cache(model, LAYERS, 40, PLACE, static_shapes=False)
    assert type(cache) is KVCache and cache.max_length == 40
    release_cache(model, cache)
    assert acquire_cache(model, LAYERS, 40, PLACE, static_shapes=False) is not cache


@torch.inference_mode()
def test_nothing_of_an_earlier_text_is_left_in_a_lent_cache() -> None:
    """Masked positions are read, too, and what is no number stays none whatever it is multiplied by."""
    model = build("llama")
    view, outputs = decoding_view(model), []
    for spoilt in (False, True):
        cache = _lent(model)
        assert cache.is_written == spoilt
        for _ in range(2):
            forward(view, _tokens(8), cache, last=1)
            cache.length = 8
            outputs.append(forward(view, _tokens(1), cache, last=1))
        for states in (part for layer in cache.states() for part in layer if part is not None):
            states[:, :, 20:] = float("nan")
        release_cache(model, cache)
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_a_cache_of_other_weights_is_not_lent_again() -> None:
    model = build("llama")
    first = _lent(model)
    release_cache(model, first)
    model.to(torch.float64)
    assert _lent(model) is not first


def test_what_waits_to_be_lent_is_let_go_where_memory_is_short() -> None:
    model = build("llama")
    first = _lent(model)
    release_cache(model, first)
    release()
    assert _lent(model) is not first


def test_passes_are_recorded_on_a_gpu_unless_the_context_is_long() -> None:
    model = build("llama")
    assert isinstance(acquire_cache(model, LAYERS, 40, PLACE), RecordedCache) == (PLACE.type == "cuda")
    assert type(acquire_cache(model, LAYERS, 100_000, PLACE)) is KVCache


@pytest.mark.parametrize("positions", [4097, 4608, 4609, 8192, 8193, 20_000, 32_768])
def test_a_long_cache_is_hardly_longer_than_asked_for(positions: int) -> None:
    """As passes read all of it, masked or not; and there are few lengths, so that most prompts find one."""
    found = _lent(build("llama"), positions).max_length
    assert positions <= found <= positions * 9 / 8
    assert found % 512 == 0


def test_what_waits_on_a_device_that_a_model_has_left_is_let_go() -> None:
    """Also where nothing is recorded on the next one."""
    model = build("llama")
    first = _lent(model)
    release_cache(model, first)
    acquire_cache(model, LAYERS, 40, torch.device("meta"), static_shapes=False)
    assert _lent(model) is not first


def test_a_cache_is_of_all_weights_that_passes_read() -> None:
    model, beside = build("llama"), nn.Linear(2, 2)

    def lent() -> KVCache:
        return acquire_cache(model, LAYERS, 40, model.device, static_shapes=True, reads=[beside])

    first = lent()
    release_cache(model, first)
    assert lent() is first
    release_cache(model, first)
    beside.weight.data = beside.weight.data.clone()
    assert lent() is not first


class _Wrapped(Tensor):
    """A tensor that lies where another one says, as quantised ones do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].inner)  # of what makes a parameter of it


def test_nothing_is_recorded_where_nobody_can_tell_whether_weights_were_moved() -> None:
    model = nn.Linear(2, 2)
    assert isinstance(acquire_cache(model, 1, 40, PLACE, static_shapes=True), RecordedCache)
    model.weight = nn.Parameter(_Wrapped(torch.ones(2, 2)), requires_grad=False)
    assert type(acquire_cache(model, 1, 40, PLACE, static_shapes=True)) is KVCache


class _Holder:
    pass


def test_a_holder_has_one_cache_until_it_is_gone() -> None:
    model, holder, other = build("llama"), _Holder(), _Holder()
    first = _lent(model, holder=holder)
    assert _lent(model, holder=other) is not first
    assert _lent(model, holder=holder) is first  # which it gave back for it
    del holder
    gc.collect()
    assert _lent(model) is first
    assert _lent(model) is not first


def test_what_a_drafter_had_is_lent_again_once_it_is_gone() -> None:
    target, draft = Target(build("llama")), build("llama", 1)
    drafter = DraftModel(draft, LAYERS, 2, StopRule())
    decode(target, drafter, PROMPT, Sampling(), 8, static_shapes=True)
    first = drafter._cache
    del drafter
    gc.collect()
    assert _lent(draft) is first


def test_a_cache_may_be_returned_while_another_is_lent() -> None:
    """A holder may go at any time."""
    with lending._lock:
        free = lending._lock.acquire(blocking=False)
    assert free
    lending._lock.release()


def test_what_was_recorded_outlasts_a_client_that_goes() -> None:
    target = Target(build("llama"))

    def leave(tokens: list[int]) -> None:
        if len(tokens) < 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode(target, NoDraft(), PROMPT, Sampling(), 8, callback=leave, static_shapes=True)
    assert any(type(cache) is RecordedCache for cache in lending._waiting[target.model])


def test_an_interrupted_pass_leaves_no_trace() -> None:
    """Whether shapes were static, and what the device was told, is as in a new cache."""
    model = build("llama")
    cache = _lent(model)
    with torch.inference_mode():
        cache.length = 7
        cache._on_device().fill_(9)
        cache.static_shapes = True
    release_cache(model, cache)
    assert _lent(model) is cache
    cache.length = 7
    assert not cache.static_shapes and int(cache._on_device()) == 7

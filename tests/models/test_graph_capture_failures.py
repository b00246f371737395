"""What cannot be recorded is run as it is: this time, or for good where it never will be."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from layerskip.device.tolerance import close
from layerskip.models.cuda_graphs import Anew
from layerskip.models.forward import forward
from layerskip.models.graph_capture import RecordedCache, _refused
from layerskip.models.skip_view import decoding_view
from tests.accelerator import DEVICE
from tests.families import build

LAYERS = 4
PLACE = torch.device(DEVICE)


def _tokens(count: int) -> Tensor:
    return torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def _failing(error: Exception) -> Any:
    def fail(*_: object) -> Any:
        raise error

    return fail


def _prefilled(model: PreTrainedModel) -> tuple[PreTrainedModel, RecordedCache]:
    view, cache = decoding_view(model), RecordedCache(LAYERS, 40, PLACE)
    forward(view, _tokens(8), cache, last=1)
    cache.length = 8
    return view, cache


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), RuntimeError("no\nsuch thing")])
@torch.inference_mode()
def test_only_what_will_never_be_recorded_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Not what there was no memory for; and of what is refused, the reason is told."""
    model = build("llama")
    view, cache = _prefilled(model)
    expected = model(_tokens(11)[None], use_cache=False).logits[0, 8:]
    with monkeypatch.context() as patch:
        patch.setattr(RecordedCache, "_make", _failing(error))
        assert close(forward(view, _tokens(11)[8:], cache, last=3), expected)
    refused = "no" in str(error)[:2]
    assert (view in _refused, "as they are: no" in caplog.text, "such" in caplog.text) == (refused, refused, False)
    assert close(forward(view, _tokens(11)[8:], cache, last=3), expected)
    assert any(cache._passes.values()) != refused


@torch.inference_mode()
def test_what_is_no_number_tells_nothing_of_a_record() -> None:
    model = build("llama")
    view, cache = _prefilled(model)
    weight = model.get_output_embeddings().weight
    before, weight[3] = weight[3].clone(), float("inf")
    forward(view, _tokens(1), cache, last=1)
    assert view not in _refused and not any(cache._passes.values())
    weight[3] = before
    forward(view, _tokens(1), cache, last=1)
    assert any(cache._passes.values())


@torch.inference_mode()
def test_a_device_that_is_lost_is_no_reason_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    view, cache = _prefilled(build("llama"))
    monkeypatch.setattr(RecordedCache, "_make", _failing(RuntimeError("CUDA error: device-side assert triggered")))
    with pytest.raises(RuntimeError, match="device-side assert"):
        forward(view, _tokens(1), cache, last=1)
    with pytest.raises(RuntimeError, match="device-side assert"):
        cache.gather([1])
    assert view not in _refused and not cache.static_shapes


@torch.inference_mode()
def test_passes_that_say_nothing_are_recorded() -> None:
    view, cache = _prefilled(build("llama"))
    assert forward(view, _tokens(2), cache, last=0).shape == (0, 64)
    assert any(cache._passes.values())


@torch.inference_mode()
def test_where_no_move_can_be_recorded_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    _, cache = _prefilled(build("llama"))
    before, asked = [states.clone() for states in cache.buffers()], []
    cache.length = 4
    monkeypatch.setattr(RecordedCache, "_make", lambda *_: asked.append(1) or _failing(RuntimeError("no"))())
    for _ in range(2):
        cache.gather([2])
        cache.gather([0])
    for states, old in zip(cache.buffers(), before, strict=True):
        assert torch.equal(states[:, :, 4], old[:, :, 6])
    assert len(asked) == 1


def test_one_pass_is_recorded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    at_work: list[int] = []
    most: list[int] = []

    def slow(cache: RecordedCache, *_: object) -> Anew:
        at_work.append(0)
        most.append(len(at_work))
        time.sleep(0.2)
        at_work.pop()
        return Anew()

    @torch.inference_mode()
    def record(cache: RecordedCache) -> None:
        cache.gather([1])

    monkeypatch.setattr(RecordedCache, "_make", slow)
    caches = [RecordedCache(LAYERS, 40, PLACE) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(record, caches))
    assert most == [1, 1]

"""Passes that cannot be captured run eagerly: once, or for good if the model can never be captured."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from layerskip.device.trial import nearly_equal
from layerskip.models.forward import forward
from layerskip.models.graph_capture import CapturingCache, EagerPass, _refused
from layerskip.models.skip_view import decoding_view
from tests.accelerator import DEVICE
from tests.families import build

LAYERS = 4
TORCH_DEVICE = torch.device(DEVICE)


def _tokens(count: int) -> Tensor:
    return torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def _failing(error: Exception) -> Any:
    def fail(*_: object) -> Any:
        raise error

    return fail


def _prefilled(model: PreTrainedModel) -> tuple[PreTrainedModel, CapturingCache]:
    view, cache = decoding_view(model), CapturingCache(LAYERS, 40, TORCH_DEVICE)
    forward(view, _tokens(8), cache, last=1)
    cache.length = 8
    return view, cache


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), RuntimeError("no\nsuch thing")])
@torch.inference_mode()
def test_a_model_is_refused_only_if_it_can_never_be_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Running out of memory is no refusal. A refusal is logged with its reason."""
    model = build("llama")
    view, cache = _prefilled(model)
    expected = model(_tokens(11)[None], use_cache=False).logits[0, 8:]
    with monkeypatch.context() as patch:
        patch.setattr(CapturingCache, "_capture", _failing(error))
        assert nearly_equal(forward(view, _tokens(11)[8:], cache, last=3), expected)
    refused = "no" in str(error)[:2]
    assert (view in _refused, "run eagerly: no" in caplog.text, "such" in caplog.text) == (refused, refused, False)
    assert nearly_equal(forward(view, _tokens(11)[8:], cache, last=3), expected)
    assert any(cache._passes.values()) != refused


@torch.inference_mode()
def test_non_finite_logits_neither_refuse_nor_confirm_a_capture() -> None:
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
def test_infinite_logits_of_hidden_tokens_do_not_prevent_a_capture() -> None:
    model = build("phi")
    model.get_output_embeddings().bias[50:] = -float("inf")
    _, cache = _prefilled(model)
    forward(decoding_view(model), _tokens(1), cache, last=1)
    assert any(cache._passes.values())


@torch.inference_mode()
def test_a_lost_device_raises_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    view, cache = _prefilled(build("llama"))
    monkeypatch.setattr(CapturingCache, "_capture", _failing(RuntimeError("CUDA error: device-side assert triggered")))
    with pytest.raises(RuntimeError, match="device-side assert"):
        forward(view, _tokens(1), cache, last=1)
    with pytest.raises(RuntimeError, match="device-side assert"):
        cache.gather([1])
    assert view not in _refused and not cache.static_shapes


@torch.inference_mode()
def test_passes_without_logits_are_captured() -> None:
    view, cache = _prefilled(build("llama"))
    assert forward(view, _tokens(2), cache, last=0).shape == (0, 64)
    assert any(cache._passes.values())


@torch.inference_mode()
def test_a_move_that_cannot_be_captured_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    _, cache = _prefilled(build("llama"))
    before, attempts = [states.clone() for states in cache.buffers()], []
    cache.length = 4
    monkeypatch.setattr(CapturingCache, "_capture", lambda *_: attempts.append(1) or _failing(RuntimeError("no"))())
    for _ in range(2):
        cache.gather([2])
        cache.gather([0])
    for states, old in zip(cache.buffers(), before, strict=True):
        assert torch.equal(states[:, :, 4], old[:, :, 6])
    assert len(attempts) == 1


def test_one_pass_is_captured_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []
    peaks: list[int] = []

    def slow(cache: CapturingCache, *_: object) -> EagerPass:
        running.append(0)
        peaks.append(len(running))
        time.sleep(0.2)
        running.pop()
        return EagerPass()

    @torch.inference_mode()
    def capture(cache: CapturingCache) -> None:
        cache.gather([1])

    monkeypatch.setattr(CapturingCache, "_capture", slow)
    caches = [CapturingCache(LAYERS, 40, TORCH_DEVICE) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(capture, caches))
    assert peaks == [1, 1]

"""Captured passes give the results of eager ones, with CUDA graphs on a GPU and in static shapes on a CPU.

Passes that cannot be captured run eagerly: once, or for good if the model can never be captured.
"""

from __future__ import annotations

import copy
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.config import SpeculativeConfig
from layerskip.decoding.decode import Stops
from layerskip.decoding.drafter import NoDraft
from layerskip.decoding.sampling import Sampling
from layerskip.device.trial import nearly_equal
from layerskip.draft_plan import DraftPlan
from layerskip.drafters.registry import build_drafter
from layerskip.measure.measure import measure
from layerskip.models import cache_pool
from layerskip.models.cache_pool import release_cache
from layerskip.models.forward import Features, forward
from layerskip.models.graph_capture import CapturedPass, CapturingCache, _refused, capture_seconds
from layerskip.models.skip_view import decoding_view, skip_view
from layerskip.models.target import Target
from tests.accelerator import decode_static
from tests.families import REPRESENTATIVE, build
from tests.models.passes import LAYERS, TORCH_DEVICE, acquired, assert_close, filled, let_token_63_overflow, tokens_of

needs_gpu = pytest.mark.skipif(TORCH_DEVICE.type != "cuda", reason="needs a GPU")


def _prefilled(model: PreTrainedModel) -> tuple[PreTrainedModel, CapturingCache]:
    view, cache = decoding_view(model), CapturingCache(LAYERS, 40, TORCH_DEVICE)
    forward(view, tokens_of(8), cache, last=1)
    cache.length = 8
    return view, cache


def _failing(error: Exception) -> Any:
    def fail(*_: object) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("family", REPRESENTATIVE)
@torch.inference_mode()
def test_captured_passes_equal_eager_ones(family: str) -> None:
    """Over blocks of every width, wide ones first, on a cache that is rewound and reused."""
    model = build(family)
    layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    target, source = decoding_view(model), tokens_of(60)
    for prompt in (17, 9):
        cache, plain = filled(acquired(model, 60, layers=layers), target, source[:prompt], 60)
        for width in (5, 1, 3, 5, 2, 1, 7):
            block = source[cache.length : cache.length + width]
            assert_close(*(forward(target, block, held, last=width) for held in (cache, plain)))
            cache.length += max(1, width - 1)
            plain.length = cache.length
        # GPT-Neo computes its windows from the number of keys; on a GPU some mixtures of experts also synchronise.
        if family == "gpt_neo" or TORCH_DEVICE.type == "cpu":
            assert any(cache._passes.values()) == (family != "gpt_neo")
        release_cache(model, cache)


@torch.inference_mode()
def test_blocks_of_similar_widths_share_a_captured_pass() -> None:
    """Also those of which only the last row is wanted, such as the rest of a prompt."""
    model, source = build("llama"), tokens_of(20)
    view = decoding_view(model)
    cache, plain = filled(acquired(model), view, source[:9])
    for width, last in ((5, 1), (8, 8), (6, 2), (7, 1), (8, 1)):
        assert_close(*(forward(view, source[9 : 9 + width], held, last=last) for held in (cache, plain)))
    assert [len(passes) for passes in cache._passes.values()] == [1]


@torch.inference_mode()
def test_views_and_features_have_captured_passes_of_their_own() -> None:
    model, tokens = build("llama"), tokens_of(20)
    views = [decoding_view(model), skip_view(model, DraftPlan.parse("attention:1;mlp:2", LAYERS))]
    cache, plain = filled(acquired(model), views[0], tokens[:10])
    features = Features()
    for start in (10, 13, 11):
        block = tokens[start : start + 3]
        for view in views:
            assert_close(forward(view, block, cache, last=2), forward(view, block, plain, last=2))
        forward(views[0], block, cache, last=3, features=features)
        actual = features.states
        forward(views[0], block, plain, last=3, features=features)
        assert_close(actual, features.states)


@torch.inference_mode()
def test_passes_under_autocast_are_not_captured_and_those_without_logits_are() -> None:
    view, cache = _prefilled(build("llama"))
    with torch.autocast(TORCH_DEVICE.type, torch.bfloat16):
        forward(view, tokens_of(1), cache, last=1)
    assert not any(cache._passes.values())
    assert forward(view, tokens_of(2), cache, last=0).shape == (0, 64)
    assert any(cache._passes.values())


@torch.inference_mode()
def test_captured_passes_of_a_view_are_freed_with_it() -> None:
    model = build("llama")
    _, cache = _prefilled(model)
    for seed in range(3):
        view = skip_view(model, DraftPlan.parse(f"mlp:{seed}", LAYERS))
        forward(view, tokens_of(1), cache, last=1)
        assert len(cache._passes) == 1 and all(cache._passes.values())
        del view


def test_capture_time_is_not_part_of_decoding_time(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock counts passes: one for each of three drafted tokens, without those of the captures."""
    passes: list[Any] = []
    model = copy.deepcopy(tiny_target.model).cpu()
    model.get_input_embeddings().register_forward_pre_hook(lambda *args: passes.append(args))
    target = Target(model, tiny_target.tokenizer)
    monkeypatch.setattr("time.perf_counter", lambda: float(len(passes)))
    measuring = sys.modules["layerskip.measure.measure"]  # the package exports a function of this name
    monkeypatch.setattr(measuring, "decode", decode_static)
    monkeypatch.setattr(measuring, "_warmup", lambda *_: {})
    before = capture_seconds()
    measurement = measure(target, ["One."], SpeculativeConfig("layer_skip", 3, mask=""), max_new_tokens=13)
    assert capture_seconds() - before >= 2 * 3  # a step, a drafted token and a verification, each computed and captured
    (plain,), (drafted,) = measurement.baseline, measurement.candidate
    assert (plain.decode_seconds, drafted.decode_seconds, drafted.draft_seconds) == (12.0, 12.0, 9.0)
    again = capture_seconds()
    measure(target, ["One."], SpeculativeConfig(), max_new_tokens=13)
    assert capture_seconds() == again


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@torch.inference_mode()
def test_an_overflow_after_the_length_does_not_affect_later_passes(static: bool) -> None:
    """A rejected token overflows; a pass that is captured later reads its values under the mask."""
    model, tokens = build("llama").half(), tokens_of(12)
    let_token_63_overflow(model)
    tokens[tokens == 63] = 5
    overflowing = tokens.clone()
    overflowing[11] = 63
    view = decoding_view(model)
    cache, plain = filled(acquired(model), view, tokens[:9])
    if static:
        for block in (tokens[9:], overflowing[9:]):  # the first is captured
            forward(view, block, cache, last=3)
    else:
        cache.length = 0
        forward(view, overflowing, cache, last=1)
        cache.length = 9
    assert nearly_equal(forward(view, tokens[9:10], cache, last=1), forward(view, tokens[9:10], plain, last=1))
    assert any(cache._passes.values()) and view not in _refused


class _Synchronises(nn.Module):
    """A sub-layer that reads a value back from the device, as expert routing may."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Any:
        return self.inner(hidden) * (1.0 if float(hidden.sum()) > 0 else 0.5)


@needs_gpu
def test_a_model_that_synchronises_is_not_captured() -> None:
    """The device still works after it."""
    for synchronises in (True, False):
        model, tokens = build("llama"), []
        if synchronises:
            model.model.layers[1].mlp = _Synchronises(model.model.layers[1].mlp)
        for static in (True, False):
            found = decode_static(Target(model), NoDraft(), tokens_of(9).tolist(), Sampling(), 20, static=static)
            tokens.append(found.tokens)
        assert tokens[0] == tokens[1]
        assert (decoding_view(model) in _refused) == synchronises


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_decoding_reaches_the_last_position_of_a_model(family: str) -> None:
    """Padded chains must not read learned positions that do not exist."""
    model = build(family)
    limit = int(model.config.get_text_config(decoder=True).max_position_embeddings)
    prompt = (tokens_of(8).tolist() * limit)[: limit - 12]
    lookup = build_drafter(SpeculativeConfig("prompt_lookup", 6, prompt_lookup_max=3), Target(model))
    plain, static = (
        decode_static(Target(model), lookup, prompt, Sampling(), 12, static=static, stops=Stops(frozenset())).tokens
        for static in (False, True)
    )
    assert static == plain


@torch.inference_mode()
def test_a_model_is_refused_only_if_captures_fail_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal is logged with its reason."""
    model = build("llama")
    view, cache = _prefilled(model)
    expected = model(tokens_of(11)[None], use_cache=False).logits[0, 8:]
    with monkeypatch.context() as patch:
        patch.setattr(CapturingCache, "_capture", _failing(RuntimeError("no\nsuch thing")))
        for _ in range(2):
            assert view not in _refused
            assert nearly_equal(forward(view, tokens_of(11)[8:], cache, last=3), expected)
    assert (view in _refused, "run eagerly: no" in caplog.text, "such" in caplog.text) == (True, True, False)
    assert nearly_equal(forward(view, tokens_of(11)[8:], cache, last=3), expected)
    assert not any(cache._passes.values())


@pytest.mark.parametrize("failures", [1, 2])
@torch.inference_mode()
def test_a_capture_without_memory_is_tried_again_without_idle_caches(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If that does not help, the text goes on with those that it has, and the next text has new ones again."""
    view, cache = _prefilled(build("llama"))
    forward(view, tokens_of(2), cache, last=2)  # captured before
    release_cache(view, CapturingCache(LAYERS, 40, TORCH_DEVICE))
    idle, attempts, capture = [], [], CapturingCache._capture

    def scarce(*given: Any) -> CapturedPass:
        attempts.append(len(attempts))
        idle.append(len(cache_pool._free))
        if len(attempts) > failures:
            return capture(*given)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried")

    monkeypatch.setattr(CapturingCache, "_capture", scarce)
    for _ in range(3):
        forward(view, tokens_of(1), cache, last=1)
    assert idle[0] >= 1 and idle[1] == 0  # other tests leave idle caches
    assert (len(attempts), len(cache._passes[view])) == ((2, 2) if failures == 1 else (2, 1))
    cache.gather([1])
    assert len(attempts) == (3 if failures == 1 else 2)
    cache.clear()
    cache.length = 8
    forward(view, tokens_of(1), cache, last=1)
    assert len(cache._passes[view]) == 2 and view not in _refused


@torch.inference_mode()
def test_non_finite_logits_neither_refuse_nor_confirm_a_capture() -> None:
    """Infinite logits of hidden tokens are compared like others."""
    model = build("phi")
    model.get_output_embeddings().bias[50:] = -float("inf")
    view, cache = _prefilled(model)
    weight = model.get_output_embeddings().weight
    before, weight[3] = weight[3].clone(), float("inf")
    forward(view, tokens_of(1), cache, last=1)
    assert view not in _refused and not any(cache._passes.values())
    weight[3] = before
    forward(view, tokens_of(1), cache, last=1)
    assert any(cache._passes.values())


@torch.inference_mode()
def test_a_lost_device_raises_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    view, cache = _prefilled(build("llama"))
    monkeypatch.setattr(CapturingCache, "_capture", _failing(RuntimeError("CUDA error: device-side assert triggered")))
    with pytest.raises(RuntimeError, match="device-side assert"):
        forward(view, tokens_of(1), cache, last=1)
    with pytest.raises(RuntimeError, match="device-side assert"):
        cache.gather([1])
    assert view not in _refused and not cache.static_shapes


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

    def slow(cache: CapturingCache, *_: object) -> CapturedPass:
        running.append(0)
        peaks.append(len(running))
        time.sleep(0.2)
        running.pop()
        return CapturedPass()

    @torch.inference_mode()
    def capture(cache: CapturingCache) -> None:
        cache.gather([1])

    monkeypatch.setattr(CapturingCache, "_capture", slow)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(capture, [CapturingCache(LAYERS, 40, TORCH_DEVICE) for _ in range(2)]))
    assert peaks == [1, 1]

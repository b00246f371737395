"""Captured passes give the results of eager ones, with CUDA graphs on a GPU and in static shapes on a CPU."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.config import SpeculativeConfig, StopRule
from layerskip.decoding.decode import Stops
from layerskip.decoding.drafter import Context, NoDraft
from layerskip.decoding.sampling import Chooser, Sampling
from layerskip.device.tolerance import nearly_equal
from layerskip.drafters.layer_skip import LayerSkip
from layerskip.drafters.registry import build_drafter
from layerskip.mask import SkipMask
from layerskip.measure.measure import measure
from layerskip.models.cache import CacheFull, KVCache
from layerskip.models.cache_pool import acquire_cache, release_cache
from layerskip.models.draft_head import DraftHead
from layerskip.models.forward import Features, forward
from layerskip.models.graph_capture import CapturingCache, _refused, capture_seconds
from layerskip.models.skip_view import decoding_view, skip_view
from layerskip.models.target import Target
from tests.accelerator import DEVICE, decode_static
from tests.families import REPRESENTATIVE, build

LAYERS = 4
TORCH_DEVICE = torch.device(DEVICE)
needs_gpu = pytest.mark.skipif(TORCH_DEVICE.type != "cuda", reason="needs a GPU")


def _tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _acquired(model: nn.Module, positions: int = 40) -> CapturingCache:
    cache = acquire_cache(model, LAYERS, positions, TORCH_DEVICE, static_shapes=True)
    assert isinstance(cache, CapturingCache)
    return cache


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=float(expected.abs().max()) * 3e-5)


@pytest.mark.parametrize("family", REPRESENTATIVE)
@torch.inference_mode()
def test_captured_passes_equal_eager_ones(family: str) -> None:
    """Over blocks of every width, wide ones first, on a cache that is rewound and reused."""
    model = build(family)
    layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    target, source = decoding_view(model), _tokens(60)
    for prompt in (17, 9):
        cache, plain = acquire_cache(model, layers, 60, TORCH_DEVICE, True), KVCache(layers, 60, device=DEVICE)
        for width in (prompt, 5, 1, 3, 5, 2, 1, 7):
            block = source[cache.length : cache.length + width]
            actual, expected = (forward(target, block, held, last=width) for held in (cache, plain))
            _assert_close(actual, expected)
            kept = max(1, width - 1)
            cache.length += kept
            plain.length += kept
        assert isinstance(cache, CapturingCache)
        # GPT-Neo computes its windows from the number of keys; on a GPU some mixtures of experts also synchronise.
        if family == "gpt_neo" or TORCH_DEVICE.type == "cpu":
            assert any(cache._passes.values()) == (family != "gpt_neo")
        release_cache(model, cache)


@torch.inference_mode()
def test_passes_of_a_view_and_of_the_target_are_captured_separately() -> None:
    model, tokens = build("llama"), _tokens(20)
    views = [decoding_view(model), skip_view(model, SkipMask.parse("attention:1;mlp:2", LAYERS))]
    cache, plain = _acquired(model), KVCache(LAYERS, 40, device=DEVICE)
    for held in (cache, plain):
        forward(views[0], tokens[:16], held, last=1)
        held.length = 16
    for _ in range(2):
        for view in views:
            _assert_close(forward(view, tokens[16:18], cache, last=2), forward(view, tokens[16:18], plain, last=2))


@torch.inference_mode()
def test_features_are_those_of_the_replayed_pass() -> None:
    model, tokens = build("llama"), _tokens(20)
    view, features = decoding_view(model), Features(("model.layers.1", "model.layers.3"))
    cache, plain = _acquired(model), KVCache(LAYERS, 40, device=DEVICE)
    for held in (cache, plain):
        forward(view, tokens[:10], held, last=1)
        held.length = 10
    for start in (10, 13, 11):
        forward(view, tokens[start : start + 3], cache, last=3, features=features)
        actual = features.read()
        forward(view, tokens[start : start + 3], plain, last=3, features=features)
        _assert_close(actual, features.read())


@torch.inference_mode()
def test_passes_under_autocast_are_not_captured() -> None:
    model = build("llama")
    cache = _acquired(model)
    forward(decoding_view(model), _tokens(8), cache, last=1)
    cache.length = 8
    with torch.autocast(TORCH_DEVICE.type, torch.bfloat16):
        forward(decoding_view(model), _tokens(1), cache, last=1)
    assert not any(cache._passes.values())


@torch.inference_mode()
def test_writing_past_the_last_position_is_refused() -> None:
    model = build("llama")
    cache, view = CapturingCache(LAYERS, 10, TORCH_DEVICE), decoding_view(model)
    forward(view, _tokens(8), cache, last=1)
    cache.length = 8
    forward(view, _tokens(2), cache, last=2)
    cache.length = 9
    with pytest.raises(CacheFull, match="11 positions are needed, but only 10 are allocated"):
        forward(view, _tokens(2), cache, last=2)


@torch.inference_mode()
def test_the_pass_of_a_draft_head_is_captured_while_its_vocabulary_grows() -> None:
    """Its logits include the tokens of the text; with more of them than there is room for, the pass is captured anew."""
    model = build("llama", vocab_size=600)
    view, head = skip_view(model, SkipMask.parse("mlp:2", LAYERS)), DraftHead(model, torch.arange(8), 600)
    head.restrict(view)
    drafter = LayerSkip(view, 3, StopRule(), head=head)
    cache, plain, text = _acquired(model), KVCache(LAYERS, 40, device=DEVICE), torch.arange(8, 500).to(DEVICE)
    for held in (cache, plain):
        forward(decoding_view(model), text[:10], held, last=1)
        held.length = 10
    drafter.start([], cache, Chooser(Sampling(), 600, TORCH_DEVICE))
    for known, passes in ((10, 1), (14, 1), (18, 1), (400, 2), (420, 2)):
        head.follow(text[:known].tolist())
        drafted, expected = (forward(view, text[known - 1 : known], held, last=1) for held in (cache, plain))
        assert drafted.shape[-1] == 8 + known
        _assert_close(drafted, expected)
        assert len(cache._passes[view]) == passes
    drafted = drafter.draft(Context(text[:430].tolist(), text[429:430]), 3).tokens
    assert drafted.shape == (3,) and int(drafted.max()) < 8 + 430


@torch.inference_mode()
def test_captured_passes_of_a_view_are_freed_with_it() -> None:
    model = build("llama")
    cache, target = _acquired(model), decoding_view(model)
    forward(target, _tokens(8), cache, last=1)
    cache.length = 8
    for seed in range(3):
        view = skip_view(model, SkipMask.parse(f"mlp:{seed}", LAYERS))
        forward(view, _tokens(1), cache, last=1)
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
    monkeypatch.setattr(measuring, "_warmup", lambda *_: None)
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
    model, tokens = build("llama").half(), _tokens(12)
    words, values = model.get_input_embeddings().weight, model.model.layers[0].self_attn.v_proj.weight
    words[:, 0], values[:, 0], words[63] = 0.0, 6e4, torch.eye(32, dtype=torch.float16)[0]
    tokens[tokens == 63] = 5
    overflowing = tokens.clone()
    overflowing[11] = 63
    view, cache, plain = decoding_view(model), _acquired(model), KVCache(LAYERS, 40, device=DEVICE)
    for held, prompt in (cache, tokens[:9] if static else overflowing), (plain, tokens[:9]):
        forward(view, prompt, held, last=1)
        held.length = 9
    if static:
        for block in (tokens[9:], overflowing[9:]):  # the first is captured
            forward(view, block, cache, last=3)
    assert nearly_equal(forward(view, tokens[9:10], cache, last=1), forward(view, tokens[9:10], plain, last=1))
    assert any(cache._passes.values()) and view not in _refused


@needs_gpu
def test_captures_on_one_gpu_share_a_stream() -> None:
    first, second = (CapturingCache(LAYERS, 40, TORCH_DEVICE)._capturer for _ in range(2))
    assert first is not None and second is not None and first._stream is second._stream


class _Synchronises(nn.Module):
    """A sub-layer that reads a value back from the device, as expert routing may."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Any:
        return self.inner(hidden) * (1.0 if float(hidden.sum()) > 0 else 0.5)


@needs_gpu
def test_a_model_that_synchronises_is_not_captured() -> None:
    def synchronising() -> PreTrainedModel:
        model = build("llama")
        model.model.layers[1].mlp = _Synchronises(model.model.layers[1].mlp)
        return model

    prompt = _tokens(9).tolist()
    actual, expected = (
        decode_static(Target(model), NoDraft(), prompt, Sampling(), 20, static=static).tokens
        for model, static in ((synchronising(), True), (synchronising(), False))
    )
    assert actual == expected
    assert any(isinstance(part, _Synchronises) for model in _refused for part in model.modules())
    # The device still works.
    model = build("llama")
    captured, plain = (
        decode_static(Target(model), NoDraft(), prompt, Sampling(), 20, static=static).tokens for static in (True, False)
    )
    assert captured == plain


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_decoding_reaches_the_last_position_of_a_model(family: str) -> None:
    """Padded chains must not read learned positions that do not exist."""
    model = build(family)
    limit = int(model.config.get_text_config(decoder=True).max_position_embeddings)
    prompt = (_tokens(8).tolist() * limit)[: limit - 12]
    lookup = build_drafter(SpeculativeConfig("prompt_lookup", 6, prompt_lookup_max=3), Target(model))
    plain, static = (
        decode_static(Target(model), lookup, prompt, Sampling(), 12, static=static, stops=Stops(frozenset())).tokens
        for static in (False, True)
    )
    assert static == plain

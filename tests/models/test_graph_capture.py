"""Recorded passes say what unrecorded ones say, on graphs where there are graphs, and whatever came between."""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.config import SpeculativeConfig, StopRule
from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import Context, NoDraft
from layerskip.decoding.sampling import Chooser, Sampling
from layerskip.device.tolerance import close
from layerskip.drafters.layer_skip import LayerSkip
from layerskip.mask import SkipMask
from layerskip.measure.measure import measure
from layerskip.models.cache import CacheFull, KVCache
from layerskip.models.cache_pool import acquire_cache, release_cache
from layerskip.models.draft_head import DraftHead
from layerskip.models.features import Features
from layerskip.models.forward import forward
from layerskip.models.graph_capture import RecordedCache, _refused, seconds_recording
from layerskip.models.skip_view import decoding_view, skip_view
from layerskip.models.target import Target
from tests.accelerator import DEVICE
from tests.families import SKIPPABLE, build

LAYERS = 4
PLACE = torch.device(DEVICE)
on_a_gpu = pytest.mark.skipif(PLACE.type != "cuda", reason="needs graphs")


def _tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _lent(model: nn.Module, positions: int = 40) -> RecordedCache:
    cache = acquire_cache(model, LAYERS, positions, PLACE, static_shapes=True)
    assert isinstance(cache, RecordedCache)
    return cache


def _close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=float(expected.abs().max()) * 3e-5)


@pytest.mark.parametrize("family", SKIPPABLE)
@torch.inference_mode()
def test_recorded_passes_say_what_passes_say(family: str) -> None:
    """Over blocks of every width, wide ones first, on a cache that is rewound and lent again."""
    model = build(family)
    layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    target, source = decoding_view(model), _tokens(60)
    for prompt in (17, 9):
        cache, plain = acquire_cache(model, layers, 60, PLACE, True), KVCache(layers, 60, device=DEVICE)
        for width in (prompt, 5, 1, 3, 5, 2, 1, 7):
            block = source[cache.length : cache.length + width]
            found, expected = (forward(target, block, held, last=width) for held in (cache, plain))
            _close(found, expected)
            kept = max(1, width - 1)
            cache.length += kept
            plain.length += kept
        assert isinstance(cache, RecordedCache)
        # GPT-Neo cuts its windows by how many keys there are; on a GPU some mixtures of experts ask for values, too.
        if family == "gpt_neo" or PLACE.type == "cpu":
            assert any(cache._passes.values()) == (family != "gpt_neo")
        release_cache(model, cache)


@torch.inference_mode()
def test_the_skips_of_a_view_are_recorded_apart_from_the_target() -> None:
    model, tokens = build("llama"), _tokens(20)
    views = [decoding_view(model), skip_view(model, SkipMask.parse("attention:1;mlp:2", LAYERS))]
    cache, plain = _lent(model), KVCache(LAYERS, 40, device=DEVICE)
    for held in (cache, plain):
        forward(views[0], tokens[:16], held, last=1)
        held.length = 16
    for _ in range(2):
        for view in views:
            _close(forward(view, tokens[16:18], cache, last=2), forward(view, tokens[16:18], plain, last=2))


@torch.inference_mode()
def test_features_are_those_of_the_pass() -> None:
    model, tokens = build("llama"), _tokens(20)
    view, read = decoding_view(model), Features(("model.layers.1", "model.layers.3"))
    cache, plain = _lent(model), KVCache(LAYERS, 40, device=DEVICE)
    for held in (cache, plain):
        forward(view, tokens[:10], held, last=1)
        held.length = 10
    for start in (10, 13, 11):
        forward(view, tokens[start : start + 3], cache, last=3, features=read)
        found = read.read()
        forward(view, tokens[start : start + 3], plain, last=3, features=read)
        _close(found, read.read())


@torch.inference_mode()
def test_what_autocast_converts_is_not_recorded() -> None:
    model = build("llama")
    cache = _lent(model)
    forward(decoding_view(model), _tokens(8), cache, last=1)
    cache.length = 8
    with torch.autocast(PLACE.type, torch.bfloat16):
        forward(decoding_view(model), _tokens(1), cache, last=1)
    assert not any(cache._passes.values())


@torch.inference_mode()
def test_writing_behind_the_last_position_is_refused() -> None:
    model = build("llama")
    cache, view = RecordedCache(LAYERS, 10, PLACE), decoding_view(model)
    forward(view, _tokens(8), cache, last=1)
    cache.length = 8
    forward(view, _tokens(2), cache, last=2)
    cache.length = 9
    with pytest.raises(CacheFull, match="11 positions are needed, 10 are there"):
        forward(view, _tokens(2), cache, last=2)


@torch.inference_mode()
def test_a_draft_head_that_grows_with_the_text_is_not_recorded() -> None:
    """What it says behind a text has the text's tokens in it."""
    model = build("llama")
    view, head = skip_view(model, SkipMask.parse("mlp:2", LAYERS)), DraftHead(model, torch.arange(8), 64)
    head.narrow(view)
    drafter = LayerSkip(view, 3, StopRule(), head=head)
    cache, tokens = _lent(model), _tokens(20)
    forward(decoding_view(model), tokens[:10], cache, last=1)
    cache.length = 10
    chooser = Chooser(Sampling(), 64, PLACE)
    drafter.start(tokens[:10].tolist(), cache, chooser)
    for known in (10, 14, 18):
        drafter.draft(Context(tokens[:known].tolist(), tokens[known - 1 : known]), 3)
        drafted = forward(view, tokens[known - 1 : known], cache, last=1)
        assert drafted.shape[-1] == len({*range(8), *tokens[:known].tolist()})


@torch.inference_mode()
def test_nothing_of_a_view_is_kept_once_it_is_gone() -> None:
    model = build("llama")
    cache, target = _lent(model), decoding_view(model)
    forward(target, _tokens(8), cache, last=1)
    cache.length = 8
    for seed in range(3):
        view = skip_view(model, SkipMask.parse(f"mlp:{seed}", LAYERS))
        forward(view, _tokens(1), cache, last=1)
        assert len(cache._passes) == 1 and all(cache._passes.values())
        del view


def test_what_recording_takes_is_no_part_of_decoding(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that counts passes: one for each of three drafted tokens, though all that is recorded took some, too."""
    passes: list[Any] = []
    model = copy.deepcopy(tiny_target.model).cpu()
    model.get_input_embeddings().register_forward_pre_hook(lambda *given: passes.append(given))
    target = Target(model, tiny_target.tokenizer)
    monkeypatch.setattr("time.perf_counter", lambda: float(len(passes)))
    measuring = sys.modules["layerskip.measure.measure"]  # the package has a function of its name
    monkeypatch.setattr(measuring, "decode", partial(decode, static_shapes=True))
    monkeypatch.setattr(measuring, "_warm_up", lambda *_: None)
    before = seconds_recording()
    found = measure(target, ["One."], SpeculativeConfig("layer_skip", 3, mask=""), max_new_tokens=13)
    assert seconds_recording() - before >= 2 * 3  # a step, a drafted token and their verification, computed and recorded
    (plain,), (drafted,) = found.baseline, found.candidate
    assert (plain.decode_seconds, drafted.decode_seconds, drafted.draft_seconds) == (12.0, 12.0, 9.0)
    again = seconds_recording()
    measure(target, ["One."], SpeculativeConfig(), max_new_tokens=13)
    assert seconds_recording() == again


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@torch.inference_mode()
def test_what_overflows_behind_the_length_spoils_no_later_pass(static: bool) -> None:
    """Only a rejected token's values do; a pass that is recorded later reads them behind its mask."""
    model, tokens = build("llama").half(), _tokens(12)
    words, values = model.get_input_embeddings().weight, model.model.layers[0].self_attn.v_proj.weight
    words[:, 0], values[:, 0], words[63] = 0.0, 6e4, torch.eye(32, dtype=torch.float16)[0]
    tokens[tokens == 63] = 5
    loud = tokens.clone()
    loud[11] = 63
    view, cache, plain = decoding_view(model), _lent(model), KVCache(LAYERS, 40, device=DEVICE)
    for held, prompt in (cache, tokens[:9] if static else loud), (plain, tokens[:9]):
        forward(view, prompt, held, last=1)
        held.length = 9
    if static:
        for block in (tokens[9:], loud[9:]):  # the first is recorded
            forward(view, block, cache, last=3)
    assert close(forward(view, tokens[9:10], cache, last=1), forward(view, tokens[9:10], plain, last=1))
    assert any(cache._passes.values()) and view not in _refused


@on_a_gpu
def test_all_that_is_recorded_on_a_gpu_shares_a_stream() -> None:
    first, second = (RecordedCache(LAYERS, 40, PLACE)._recorder for _ in range(2))
    assert first is not None and second is not None and first._stream is second._stream


class _Asks(nn.Module):
    """A sub-layer that asks the device for a value, as routing to experts may."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Any:
        return self.inner(hidden) * (1.0 if float(hidden.sum()) > 0 else 0.5)


@on_a_gpu
def test_a_model_that_asks_the_device_is_not_recorded() -> None:
    def asking() -> PreTrainedModel:
        model = build("llama")
        model.model.layers[1].mlp = _Asks(model.model.layers[1].mlp)
        return model

    prompt = _tokens(9).tolist()
    found, expected = (
        decode(Target(model), NoDraft(), prompt, Sampling(), 20, static_shapes=static).tokens
        for model, static in ((asking(), True), (asking(), False))
    )
    assert found == expected
    assert any(isinstance(part, _Asks) for model in _refused for part in model.modules())
    # The device is as well as before.
    model = build("llama")
    recorded, plain = (
        decode(Target(model), NoDraft(), prompt, Sampling(), 20, static_shapes=static).tokens for static in (True, False)
    )
    assert recorded == plain

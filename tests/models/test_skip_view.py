"""Views with skipped sub-layers on every model family, compared with the model under forward hooks."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.mask import MaskError, SkipMask
from layerskip.models.architecture import UnsupportedModel, check_rewind
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
from layerskip.models.packing import set_packing
from layerskip.models.skip_view import cached_skip_view, decoding_view, skip_view
from tests.accelerator import DEVICE
from tests.families import REFUSED, SKIPPABLE, build

ATTENTION = ("self_attn", "attn", "attention", "self_attention")
MLP = ("mlp", "feed_forward", "block_sparse_moe")

# More than twice the sliding windows and chunks of tests.families.
LENGTH = 20
MASKS = ("attention:0", "attention:3", "mlp:1", "layers:2", "attention:0-1;mlp:1-2", "layers:0-3")


@pytest.fixture(scope="module", params=SKIPPABLE)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


def _tokens(seed: int = 0) -> Tensor:
    return torch.randint(3, 64, (LENGTH,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _layers(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def _mask(model: PreTrainedModel, text: str) -> SkipMask:
    return SkipMask.parse(text, _layers(model))


def _fresh(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    return logits


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=float(expected.abs().max()) * 1e-5)


def _zero(module: nn.Module, args: Any, output: Any) -> Any:
    return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)


@contextmanager
def _hooked(model: PreTrainedModel, mask: SkipMask) -> Iterator[None]:
    """Set the outputs of the model's skipped children to zero; they still fill the cache."""
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    assert len(layers) == mask.layers
    hooks = []
    for index, layer in enumerate(layers):
        for names, skipped in ((ATTENTION, mask.attention[index]), (MLP, mask.mlp[index])):
            (child,) = (child for name, child in layer.named_children() if name in names)
            if skipped:
                hooks.append(child.register_forward_hook(_zero))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def test_a_view_that_skips_nothing_is_the_model(model: PreTrainedModel) -> None:
    plain = _fresh(model, _tokens())
    actual = _fresh(skip_view(model, SkipMask.none(_layers(model))), _tokens())
    torch.testing.assert_close(actual, plain, rtol=0, atol=1e-5 * float(plain.abs().max()))
    model = copy.deepcopy(model)
    set_packing(model, False)  # without packed weights, the sums are the same
    assert torch.equal(_fresh(skip_view(model, SkipMask.none(_layers(model))), _tokens()), plain)


def test_a_view_shares_every_weight(model: PreTrainedModel) -> None:
    for view in (skip_view(model, _mask(model, "layers:1;attention:0;mlp:3")), decoding_view(model)):
        for ours, theirs in ((view.parameters(), model.parameters()), (view.buffers(), model.buffers())):
            assert [(t.data_ptr(), t.shape) for t in ours] == [(t.data_ptr(), t.shape) for t in theirs]


def test_building_and_running_a_view_does_not_change_the_model(model: PreTrainedModel) -> None:
    before = _fresh(model, _tokens())
    view = skip_view(model, _mask(model, "layers:0-3"))
    assert not torch.allclose(_fresh(view, _tokens()), before)
    assert torch.equal(_fresh(model, _tokens()), before)


@pytest.mark.parametrize("text", MASKS)
def test_a_skipped_sublayer_adds_nothing(model: PreTrainedModel, text: str) -> None:
    mask = _mask(model, text)
    with _hooked(model, mask):
        expected = _fresh(model, _tokens())
    _assert_close(_fresh(skip_view(model, mask), _tokens()), expected)


@torch.inference_mode()
@pytest.mark.parametrize("text", ["attention:0;mlp:2", "layers:0-1;attention:3"])
def test_draft_and_verification_share_one_cache(model: PreTrainedModel, text: str) -> None:
    """The draft reads the target's prefix as with transformers' own cache; verification overwrites the draft."""
    mask, prefix = _mask(model, text), 13
    tokens = _tokens()
    target, view, cache = decoding_view(model), skip_view(model, mask), KVCache(_layers(model), LENGTH, device=DEVICE)
    forward(target, tokens[:prefix], cache, last=1)
    cache.length = prefix
    reference = model(input_ids=tokens[None, :prefix], use_cache=True).past_key_values

    fed, drafted = tokens[prefix : prefix + 1], [tokens[prefix : prefix + 1]]
    for _ in range(3):
        actual = forward(view, fed, cache, last=1)
        cache.length += 1
        with _hooked(model, mask):
            expected = model(input_ids=fed[None], past_key_values=reference, use_cache=True).logits[0]
        _assert_close(actual, expected)
        fed = actual.argmax(-1)
        drafted.append(fed)

    cache.length = prefix
    block = torch.cat(drafted)
    verified = forward(target, block, cache, last=4)
    _assert_close(verified, _fresh(model, torch.cat((tokens[:prefix], block)))[prefix:])
    cache.length = prefix + 2  # one drafted token is accepted, and another one follows it
    rest = torch.cat((tokens[:prefix], block[:2], tokens[prefix + 2 :]))
    _assert_close(forward(target, rest[prefix + 2 :], cache, last=5), _fresh(model, rest)[prefix + 2 :])


def test_views_of_one_model_are_independent() -> None:
    model = build("llama")
    masks = [SkipMask.parse(text, 4) for text in ("attention:0", "mlp:0", "layers:1-2")]
    views = [skip_view(model, mask) for mask in masks]
    for view, mask in zip(views, masks, strict=True):
        with _hooked(model, mask):
            expected = _fresh(model, _tokens())
        _assert_close(_fresh(view, _tokens()), expected)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "mixtral"])
def test_views_do_not_keep_a_model_alive(family: str) -> None:
    """A search drops one view per trial, and a benchmark one model after the other."""
    model = build(family)
    views = [make(model, _mask(model, "layers:1")) for make in (skip_view, cached_skip_view)] + [decoding_view(model)]
    forward(views[0], _tokens(), KVCache(_layers(model), LENGTH, device=DEVICE), last=1)
    kept = [weakref.ref(part) for part in (model, *views)]
    del model, views
    gc.collect()
    assert [part() for part in kept] == [None] * 4


def test_the_last_view_of_a_model_is_cached() -> None:
    """Its captured passes are kept with it; views of earlier masks are freed."""
    model = build("llama")
    first, other = (SkipMask.parse(text, 4) for text in ("attention:0", "mlp:0"))
    view = weakref.ref(cached_skip_view(model, first))
    assert cached_skip_view(model, SkipMask.parse("attention:0", 4)) is view()
    assert cached_skip_view(model, other) is not view()
    gc.collect()
    assert view() is None
    last = cached_skip_view(model, other)
    model.get_input_embeddings().weight = torch.nn.Parameter(torch.ones(64, 32, device=DEVICE))
    assert cached_skip_view(model, other) is not last


@pytest.mark.parametrize("layers", [0, 3, 5])
def test_a_mask_of_another_depth_is_refused(layers: int) -> None:
    with pytest.raises(MaskError, match=f"^mask: is for {layers} layers; LlamaForCausalLM has 4"):
        skip_view(build("llama"), SkipMask.none(layers))


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_skipped_is_refused_by_name_and_reason(family: str) -> None:
    model = build(family)
    with pytest.raises(UnsupportedModel) as refusal:
        skip_view(model, SkipMask.none(_layers(model)))
    name, colon, reason = str(refusal.value).partition(": ")
    assert (name, colon) == (type(model).__name__, ": ")
    words = {"recurrent state": "rewind", "the residual": "residual", "no child": "MLP"}
    assert any(word in reason for start, word in words.items() if REFUSED[family].startswith(start))


@pytest.mark.parametrize("family", [family for family, why in REFUSED.items() if why.startswith("recurrent")])
def test_recurrent_state_is_refused_before_anything_is_decoded(family: str) -> None:
    model = build(family)
    for _ in range(2):  # refused again
        with pytest.raises(UnsupportedModel, match=f"^{type(model).__name__}: .*rewind"):
            check_rewind(model)

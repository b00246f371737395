"""Views with skipped sub-layers on every model family, compared with the model under forward hooks."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from layerskip import SpeculativeConfig, Target, generate
from layerskip.draft_plan import DraftPlan
from layerskip.models.architecture import UnsupportedModel
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
from layerskip.models.packing import set_packing
from layerskip.models.skip_view import cached_skip_view, decoding_view, skip_view
from tests.accelerator import DEVICE
from tests.families import REFUSED, SKIPPABLE, build
from tests.models.passes import LAYERS, assert_close, fresh, tokens_of

ATTENTION = ("self_attn", "attn", "attention", "self_attention")
MLP = ("mlp", "feed_forward", "block_sparse_moe")

TOKENS = tokens_of(20)  # more than twice the sliding windows and chunks of tests.families
MASKS = ("attention:3", "mlp:1", "layers:2", "attention:0-1;mlp:1-2")


@pytest.fixture(scope="module", params=SKIPPABLE)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


_assert_close = partial(assert_close, tolerance=1e-5)


def _zero(module: nn.Module, args: Any, output: Any) -> Any:
    return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)


@contextmanager
def _hooked(model: PreTrainedModel, mask: DraftPlan) -> Iterator[None]:
    """Set the outputs of the model's skipped children to zero; they still fill the cache."""
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    assert len(layers) == mask.layers
    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            for names, skipped in ((ATTENTION, mask.attention[index]), (MLP, mask.mlp[index])):
                (child,) = (child for name, child in layer.named_children() if name in names)
                if skipped:
                    hooks.enter_context(child.register_forward_hook(_zero))
        yield


def test_a_view_shares_every_weight_and_does_not_change_the_model(model: PreTrainedModel) -> None:
    """One that skips nothing is the model; without packed weights, the sums are the same."""
    plain, nothing = fresh(model, TOKENS), DraftPlan.none(LAYERS)
    _assert_close(fresh(skip_view(model, nothing), TOKENS), plain)
    view = skip_view(model, DraftPlan.parse("layers:0-3", LAYERS))
    assert not torch.allclose(fresh(view, TOKENS), plain)
    for each in (view, decoding_view(model)):
        for ours, theirs in ((each.parameters(), model.parameters()), (each.buffers(), model.buffers())):
            assert [(t.data_ptr(), t.shape) for t in ours] == [(t.data_ptr(), t.shape) for t in theirs]
    assert torch.equal(fresh(model, TOKENS), plain)
    unpacked = copy.deepcopy(model)
    set_packing(unpacked, False)
    assert torch.equal(fresh(skip_view(unpacked, nothing), TOKENS), plain)


def test_a_skipped_sublayer_adds_nothing(model: PreTrainedModel) -> None:
    masks = [DraftPlan.parse(text, LAYERS) for text in MASKS]
    for mask, view in [(mask, skip_view(model, mask)) for mask in masks]:  # which are independent of each other
        with _hooked(model, mask):
            expected = fresh(model, TOKENS)
        _assert_close(fresh(view, TOKENS), expected)


@torch.inference_mode()
def test_draft_and_verification_share_one_cache(model: PreTrainedModel) -> None:
    """The draft reads the target's prefix as with transformers' own cache; verification overwrites the draft."""
    mask, prefix, tokens = DraftPlan.parse("layers:0;mlp:2;attention:3", LAYERS), 13, TOKENS
    target, view, cache = decoding_view(model), skip_view(model, mask), KVCache(LAYERS, len(TOKENS))
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
    _assert_close(verified, fresh(model, torch.cat((tokens[:prefix], block)))[prefix:])
    cache.length = prefix + 2  # one drafted token is accepted, and another one follows it
    rest = torch.cat((tokens[:prefix], block[:2], tokens[prefix + 2 :]))
    _assert_close(forward(target, rest[prefix + 2 :], cache, last=5), fresh(model, rest)[prefix + 2 :])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "mixtral"])
def test_views_do_not_keep_a_model_alive(family: str) -> None:
    """A search drops one view per trial, and a benchmark one model after the other."""
    model = build(family)
    mask = DraftPlan.parse("layers:1", LAYERS)
    views = [skip_view(model, mask), cached_skip_view(model, mask), decoding_view(model)]
    forward(views[0], TOKENS, KVCache(LAYERS, len(TOKENS)), last=1)
    kept = [weakref.ref(part) for part in (model, *views)]
    del model, views
    gc.collect()
    assert [part() for part in kept] == [None] * 4


def test_the_last_view_of_a_model_is_cached() -> None:
    """Its captured passes are kept with it; views of earlier masks are freed."""
    model = build("llama")
    first, other = (DraftPlan.parse(text, 4) for text in ("attention:0", "mlp:0"))
    view = weakref.ref(cached_skip_view(model, first))
    assert cached_skip_view(model, DraftPlan.parse("attention:0", 4)) is view()
    assert cached_skip_view(model, other) is not view()
    gc.collect()
    assert view() is None
    last = cached_skip_view(model, other)
    model.get_input_embeddings().weight = torch.nn.Parameter(torch.ones(64, 32, device=DEVICE))
    assert cached_skip_view(model, other) is not last


def _forgetting(model: PreTrainedModel) -> None:
    """Count positions from 0 in every pass."""
    own = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda hidden, position_ids: own(hidden, position_ids - position_ids[:, :1])


def _recurrent(model: PreTrainedModel) -> None:
    """Keep a state outside the cache, which grows with every pass."""
    state = torch.zeros(32, device=DEVICE)
    model.get_input_embeddings().register_forward_hook(lambda _, args, output: output + state.add_(output[0, -1]))


def _renamed(model: PreTrainedModel) -> None:
    """Take the cache by another name."""
    own = model.forward
    model.forward = lambda input_ids, cache=None, **_: own(input_ids)


def _demanding(model: PreTrainedModel) -> None:
    """Need an image, too."""
    own = model.forward
    model.forward = lambda image, **inputs: own(**inputs)


def _unlisted(model: PreTrainedModel) -> None:
    """Have one list of more modules than layers."""
    model.config.num_hidden_layers -= 1


def _direct(model: PreTrainedModel) -> None:
    """Compute an MLP without calling its module."""
    mlp = model.model.layers[2].mlp
    model.model.layers[2].forward = lambda hidden_states, **_: hidden_states + mlp.forward(hidden_states)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_forgetting, "its cache does not rewind: tokens before a pass do not count as in one pass"),
        (_recurrent, "its cache does not rewind: rejected tokens change later logits"),
        (_renamed, "it does not store keys and values in the cache it is given, so it cannot rewind"),
        (_demanding, r"it does not decode on a key-value cache that can rewind \(.* argument: 'image'\)"),
        (_unlisted, "it has no list of all its decoder layers"),
        (_direct, "layer 2, or one of its sub-layers, does not run in a forward pass"),
    ],
)
def test_a_model_that_computes_otherwise_is_refused_with_the_reason(
    change: Callable[[PreTrainedModel], None], reason: str
) -> None:
    change(model := build("llama"))
    with pytest.raises(UnsupportedModel, match=f"^LlamaForCausalLM: {reason}$"):
        skip_view(model, DraftPlan.none(LAYERS))


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_skipped_is_refused_by_name_and_reason(family: str) -> None:
    """Recurrent state is refused before anything is decoded, each time."""
    model = build(family)
    with pytest.raises(UnsupportedModel) as refusal:
        skip_view(model, DraftPlan.none(LAYERS))
    words = {"recurrent state": "rewind", "the residual": "residual", "no child": "MLP"}
    (word,) = (word for start, word in words.items() if REFUSED[family].startswith(start))
    assert re.match(f"{type(model).__name__}: .*{word}", str(refusal.value))
    for kind in ("none", "prompt_lookup") if word == "rewind" else ():
        with pytest.raises(UnsupportedModel, match=f"^{type(model).__name__}: .*rewind"):
            generate(Target(model), [7, 8], SpeculativeConfig(kind), max_new_tokens=4)

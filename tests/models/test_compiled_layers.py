"""Compiled layers give the outputs of the layers as they are; models that cannot be compiled run on."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.decoding.decode import Stops, decode
from layerskip.decoding.drafter import NoDraft
from layerskip.decoding.sampling import Sampling
from layerskip.decoding.tree import tree_model
from layerskip.mask import SkipMask
from layerskip.models import compiled_layers as module
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import release_cache
from layerskip.models.compiled_layers import CompiledLayers, FusedLinear, compiled_layers, set_compiling
from layerskip.models.forward import forward
from layerskip.models.graph_capture import CapturingCache
from layerskip.models.skip_view import decoding_view, skip_view
from layerskip.models.target import Target, TargetError
from tests.accelerator import DEVICE
from tests.exhaustive import EXHAUSTIVE
from tests.families import SKIPPABLE, build
from tests.models.passes import LAYERS, TORCH_DEVICE, acquired, assert_close, filled, tokens_of

EXHAUSTIVE_ONLY = pytest.mark.skipif(not EXHAUSTIVE, reason="compiling takes seconds a family; run by make lossless")
COMPILED = ("llama", "gemma3_text")  # one of plain layers, one of two types of layers with norms of queries and keys
BLOCK = tokens_of(20)[12:18]


def _model(family: str) -> PreTrainedModel:
    model = build(family)
    set_compiling(model, "on")
    return model


def _caches(model: PreTrainedModel, view: nn.Module, prompt: int) -> tuple[CapturingCache, KVCache]:
    """Return a capturing and a plain cache, filled with a prompt."""
    layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    return filled(acquired(model, 60, layers=layers), view, tokens_of(prompt), 60)


def _compiled_passes(cache: CapturingCache) -> list[bool]:
    return [captured.layers is not None for passes in cache._passes.values() for captured in passes.values()]


def _fail(*_: object) -> None:
    raise TypeError("no\nsuch thing")


def _double(*args: Any) -> Any:
    return 2 * module._run(*args)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the layers that would be compiled as they are."""
    monkeypatch.setattr(module, "_compiled_run", lambda fuses: module._run)


@EXHAUSTIVE_ONLY
@pytest.mark.parametrize("family", SKIPPABLE)
@torch.inference_mode()
def test_compiled_chains_equal_eager_ones(family: str) -> None:
    """Beyond the sliding windows of the family."""
    with torch.inference_mode(False):
        model = _model(family)
    view = decoding_view(model)
    cache, plain = _caches(model, view, 17)
    for width in (1, 3, 1):
        block = tokens_of(40)[cache.length : cache.length + width]
        assert_close(*(forward(view, block, held, last=width) for held in (cache, plain)))
        cache.length += width
        plain.length += width
    if family in COMPILED:
        assert _compiled_passes(cache) == [True, True]
    release_cache(model, cache)


@torch.inference_mode()
def test_compiled_trees_and_views_equal_eager_ones() -> None:
    """A view with skipped sub-layers uses what was compiled for its whole layers."""
    with torch.inference_mode(False):
        model = _model("llama")
    trees, view = tree_model(model), skip_view(model, SkipMask.parse("layers:1;attention:2", LAYERS))
    cache, plain = _caches(model, decoding_view(model), 12)
    assert_close(*(trees.run(BLOCK, (-1, 0, 0, 2, -1), held) for held in (cache, plain)))
    assert_close(*(forward(view, BLOCK[:2], held, last=2) for held in (cache, plain)))
    assert _compiled_passes(cache) == [True, True]


def test_the_weights_of_siblings_are_laid_out_without_a_copy() -> None:
    """Values, names and training of the model do not change, and a move to another memory keeps it working."""
    model = _model("llama")
    before = copy.deepcopy(model.state_dict())
    acquired(model)
    attention = model.model.layers[1].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(tokens_of(5)[None]).logits.sum().backward()
    assert attention.k_proj.weight.grad is not None
    for _ in range(2):
        assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
        assert parts[1].data_ptr() == parts[0].data_ptr() + parts[0].nbytes
        for part in parts:
            part.data = part.data.clone()
        acquired(model)


@pytest.mark.parametrize("bias", [False, True])
def test_a_single_row_is_multiplied_as_several_are(bias: bool) -> None:
    layers = [nn.Linear(8, size, bias=bias) for size in (6, 3)]
    fused, row = FusedLinear(layers, single_rows=True), torch.randn(1, 1, 8)
    for actual, layer in zip(fused.compute(row), layers, strict=True):
        torch.testing.assert_close(actual, layer(row))


def test_layers_are_compiled_on_cuda_by_default_and_the_mode_of_a_model_reaches_its_views() -> None:
    """Another target over the same model, as ``custom_generate`` makes one, changes nothing; a new mode makes new views."""
    model = build("llama")
    assert (compiled_layers(model) is not None) == (TORCH_DEVICE.type == "cuda")
    for mode, compiled in (("on", True), (None, True), ("off", False)):
        Target(model, compile=mode)
        assert (compiled_layers(decoding_view(model)) is not None) == compiled
    with pytest.raises(TargetError, match=r"^target.compile: 'maybe' is not auto, on, off$"):
        Target(model, compile="maybe")


@pytest.mark.usefixtures("uncompiled")
@torch.inference_mode()
def test_a_compiled_tree_model_is_freed_with_its_model() -> None:
    """Its layers refer to it, so whatever keeps them for the compiler must not keep it."""
    model = _model("llama")
    cache, _ = _caches(model, decoding_view(model), 12)
    tree_model(model).run(BLOCK, (-1, 0, 0, 2, -1), cache)
    assert _compiled_passes(cache) == [True]
    views = [weakref.ref(tree_model(model).view), weakref.ref(decoding_view(model))]
    del model, cache
    gc.collect()
    assert [view() for view in views] == [None, None]


def test_compiling_on_request_captures_passes_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    monkeypatch.setattr(module, "_compiled_run", lambda fuses: lambda *args: (runs.append(1), module._run(*args))[1])
    target = Target(build("llama"), compile="on")
    expected = decode(Target(build("llama")), NoDraft(), [3, 4, 5], Sampling(), 8, stops=Stops(frozenset())).tokens
    assert decode(target, NoDraft(), [3, 4, 5], Sampling(), 8, stops=Stops(frozenset())).tokens == expected
    assert runs


@torch.inference_mode()
def test_another_thread_may_run_the_view_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a check of an output beside a decoding. Its pass runs the layers as they are, on its own cache."""
    with torch.inference_mode(False):
        model = _model("llama")
    view, tokens = decoding_view(model), tokens_of(16)
    cache, plain = _caches(model, view, 12)
    expected = forward(view, tokens, KVCache(LAYERS, 16, device=DEVICE), last=16)
    found: list[Tensor] = []

    @torch.inference_mode()
    def check() -> None:
        found.append(forward(view, tokens, KVCache(LAYERS, 16, device=DEVICE), last=16))

    def run(*args: Any) -> Any:
        if not found:  # between two layers of the compiled pass
            thread = threading.Thread(target=check)
            thread.start()
            thread.join()
        return module._run(*args)

    monkeypatch.setattr(module, "_compiled_run", lambda fuses: run)
    assert_close(*(forward(view, tokens[12:], held, last=4) for held in (cache, plain)))
    assert _compiled_passes(cache) == [True]
    assert len(found) == 1
    assert torch.equal(found[0], expected)


@pytest.mark.usefixtures("uncompiled")
def test_replaced_weights_are_read_by_compiled_layers() -> None:
    """Also if only their data was replaced, as by an average of weights."""
    model = _model("llama")
    with torch.inference_mode():
        cache, _ = _caches(model, decoding_view(model), 12)
        forward(decoding_view(model), BLOCK[:4], cache, last=4)
        release_cache(model, cache)
    for weight in model.parameters():
        weight.data = weight.data * 0.7
    with torch.inference_mode():
        view = decoding_view(model)
        cache, plain = _caches(model, view, 12)
        assert_close(*(forward(view, BLOCK[:4], held, last=4) for held in (cache, plain)))
        assert _compiled_passes(cache) == [True]


@torch.inference_mode()
def test_a_model_that_cannot_be_compiled_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one line in the log; its passes are captured all the same."""
    model = _model("llama")
    view = decoding_view(model)
    cache, plain = _caches(model, view, 12)
    monkeypatch.setattr(module, "_compiled_run", lambda fuses: _fail)
    for width in (3, 1):
        assert_close(*(forward(view, BLOCK[:width], held, last=width) for held in (cache, plain)))
    assert caplog.text.count("run as they are: no") == 1
    assert "such" not in caplog.text
    assert _compiled_passes(cache) == [False, False]


@pytest.mark.parametrize(("wrong", "reason"), [(_fail, "no"), (_double, "the captured pass gives other results")])
@torch.inference_mode()
def test_layers_whose_products_cannot_be_fused_are_compiled_without(
    wrong: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU: once, with one line in the log, whether compiling fails or the results differ."""
    asked: list[bool] = []
    monkeypatch.setattr(module, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(module, "_unfused", set())
    monkeypatch.setattr(module, "_compiled_run", lambda fuses: asked.append(fuses) or (wrong if fuses else module._run))
    with torch.inference_mode(False):
        model = _model("llama")
    view = decoding_view(model)
    cache, plain = _caches(model, view, 12)
    for width in (3, 1):
        assert_close(*(forward(view, BLOCK[:width], held, last=width) for held in (cache, plain)))
    assert _compiled_passes(cache) == [True, True]
    assert asked[0]
    assert not any(asked[-2 * LAYERS :])
    assert not CompiledLayers(view, "model.layers").fuses  # nor are those of other views of such models
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == [reason]

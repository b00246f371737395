"""Compiled layers give the outputs of the layers as they are; models that cannot be compiled run on.

For them, weights are laid out as one matrix, which nothing else may notice.
"""

from __future__ import annotations

import gc
import io
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from layerskip.decoding.decode import Stops, decode
from layerskip.decoding.drafter import NoDraft
from layerskip.decoding.sampling import Sampling
from layerskip.decoding.tree import tree_model
from layerskip.draft_plan import DraftPlan
from layerskip.models import compiled_layers as module
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import release_cache
from layerskip.models.compiled_layers import CompiledLayers, compiled_layers, prepare_compiling
from layerskip.models.forward import forward
from layerskip.models.graph_capture import CapturingCache
from layerskip.models.skip_view import decoding_view, skip_view
from layerskip.models.target import Target, TargetError
from tests.accelerator import DEVICE, compile_anywhere
from tests.families import build
from tests.models.passes import LAYERS, acquired, assert_close, filled, fresh, tokens_of
from tests.reference import generated

BLOCK = tokens_of(20)[12:18]


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


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_anywhere(monkeypatch)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces layers as for the compiler, which takes many seconds, and runs the traces."""
    compiled = torch.compile(module._run, fullgraph=True, dynamic=False, backend="aot_eager")
    monkeypatch.setattr(module, "_compiled_run", lambda fuses: compiled)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the layers that would be compiled as they are."""
    monkeypatch.setattr(module, "_compiled_run", lambda fuses: module._run)


@pytest.mark.usefixtures("traced")
@torch.inference_mode()
def test_compiled_trees_and_views_equal_eager_ones() -> None:
    """A view with skipped sub-layers uses what was compiled for its whole layers."""
    with torch.inference_mode(False):
        model = build("llama")
    trees, view = tree_model(model), skip_view(model, DraftPlan.parse("layers:1;attention:2", LAYERS))
    cache, plain = _caches(model, decoding_view(model), 12)
    assert_close(*(trees.run(BLOCK, (-1, 0, 0, 2, -1), held) for held in (cache, plain)))
    assert_close(*(forward(view, BLOCK[:2], held, last=2) for held in (cache, plain)))
    assert _compiled_passes(cache) == [True, True]


@pytest.mark.usefixtures("uncompiled")
@torch.inference_mode()
def test_a_compiled_tree_model_is_freed_with_its_model() -> None:
    """Its layers refer to it, so whatever keeps them for the compiler must not keep it."""
    model = build("llama")
    cache, _ = _caches(model, decoding_view(model), 12)
    tree_model(model).run(BLOCK, (-1, 0, 0, 2, -1), cache)
    assert _compiled_passes(cache) == [True]
    views = [weakref.ref(tree_model(model).view), weakref.ref(decoding_view(model))]
    del model, cache
    gc.collect()
    assert [view() for view in views] == [None, None]


@pytest.fixture(params=["llama", "qwen2"])  # without and with biases
def laid_out(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model whose weights of parallel layers were laid out as matrices."""
    model = build(request.param)
    prepare_compiling(model)
    query, key = model.model.layers[1].self_attn.q_proj, model.model.layers[1].self_attn.k_proj
    assert (query.bias is not None) == (request.param == "qwen2")
    assert key.weight.data_ptr() == query.weight.data_ptr() + query.weight.nbytes
    return model


def test_laid_out_weights_are_trained_and_saved_as_before(laid_out: PreTrainedModel, tmp_path: Path) -> None:
    """Values and names do not change, and a move to another memory lays them out again."""
    models, sizes, states = (build(laid_out.config.model_type), laid_out), [], []
    for place, model in enumerate(models):
        model.save_pretrained(tmp_path / str(place), max_shard_size="10KB")
        sizes.append({file.name: file.stat().st_size for file in (tmp_path / str(place)).glob("*.safetensors")})
        states.append(io.BytesIO())
        torch.save(model.state_dict(), states[-1])
    assert sizes[0] == sizes[1] and len(sizes[0]) > 1
    assert states[1].tell() <= states[0].tell()  # fewer storages, each with a header
    expected, other = fresh(laid_out, BLOCK), build(laid_out.config.model_type, 1)
    states[1].seek(0)
    other.load_state_dict(torch.load(states[1], weights_only=True))
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "1").to(DEVICE)
    assert all(torch.equal(fresh(model, BLOCK), expected) for model in (other, stored))
    laid_out(BLOCK[None]).logits.sum().backward()
    key = laid_out.model.layers[1].self_attn.k_proj.weight
    assert key.grad is not None
    for part in laid_out.parameters():
        part.data = part.data.clone()
    acquired(laid_out)
    assert key.untyped_storage().nbytes() > key.nbytes


def test_the_mode_of_a_model_reaches_its_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another target over the same model, as ``custom_generate`` makes one, changes nothing; a new mode makes new views."""
    runs = []
    monkeypatch.setattr(module, "_compiled_run", lambda fuses: lambda *args: (runs.append(1), module._run(*args))[1])
    model = build("llama")
    for mode, compiled in ((None, True), ("off", False), (None, False), ("auto", True)):
        target = Target(model, compile=mode)
        assert (compiled_layers(decoding_view(model)) is not None) == compiled
        runs.clear()
        found = decode(target, NoDraft(), [3, 4, 5], Sampling(), 8, stops=Stops(frozenset())).tokens
        assert found == generated(model, [3, 4, 5], 8, eos_token_id=None)
        assert bool(runs) == compiled
    with pytest.raises(TargetError, match=r"^target.compile: 'maybe' is not auto, off$"):
        Target(model, compile="maybe")


@torch.inference_mode()
def test_another_thread_may_run_the_view_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a check of an output beside a decoding. Its pass runs the layers as they are, on its own cache."""
    with torch.inference_mode(False):
        model = build("llama")
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
@torch.inference_mode()
def test_threads_run_the_compiled_layers_of_a_shared_view_in_turn() -> None:
    """As for a draft model of two targets. The second pass waits for the first, and is compiled, too."""
    with torch.inference_mode(False):
        model = build("llama")
    layers, entered, left = compiled_layers(decoding_view(model)), threading.Event(), list[bool]()
    assert layers is not None

    def enter() -> None:
        with layers.running(lambda mask: mask):
            left.append(bool(entered.is_set()))
            left.append("forward" in layers._layers[0].__dict__)

    with layers.running(lambda mask: mask):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(0.1)
        entered.set()
    thread.join()
    assert left == [True, True]


@pytest.mark.usefixtures("traced")
def test_replaced_weights_are_read_by_compiled_layers() -> None:
    """Also if only their data was replaced, as by an average of weights."""
    model = build("llama")
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


FUSED = "products of its layers cannot be fused with what surrounds them: "
UNFUSED = "its layers cannot be compiled and run as they are: "


def _decoded_in_two_widths() -> tuple[Any, Any]:
    """Return a view and its cache after passes of two widths, whose results were those of passes without compiling."""
    with torch.inference_mode(False):
        model = build("llama")
    view = decoding_view(model)
    cache, plain = _caches(model, view, 12)
    for width in (3, 1):
        assert_close(*(forward(view, BLOCK[:width], held, last=width) for held in (cache, plain)))
    return view, cache


@pytest.mark.parametrize("failures", [1, 9])
@torch.inference_mode()
def test_one_failure_that_may_pass_costs_no_fusions(
    failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Compilers raise errors of their own from that of the system."""
    asked: list[bool] = []
    monkeypatch.setattr(module, "_unfused", set())

    def run(*args: Any) -> Any:
        if len(asked) > failures:
            return module._run(*args)
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise RuntimeError("no") from error

    monkeypatch.setattr(module, "_compiled_run", lambda fuses: (asked.append(fuses), run)[1])
    _, cache = _decoded_in_two_widths()
    assert _compiled_passes(cache) == [failures == 1] * 2
    assert all(asked) == (failures == 1)
    assert caplog.records[0].message == "LlamaForCausalLM: its layers could not be compiled and are tried again: no"
    assert len(caplog.records) == (1 if failures == 1 else 3)


@pytest.mark.parametrize(("wrong", "logged"), [([True, False], [FUSED, UNFUSED]), ([True], [FUSED])])
@pytest.mark.parametrize("fails", [True, False])
@torch.inference_mode()
def test_layers_that_cannot_be_compiled_run_with_fewer_fusions_or_as_they_are(
    wrong: list[bool], logged: list[str], fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a line in the log, whether compiling fails or the results differ; passes are captured all the same."""
    asked: list[bool] = []
    monkeypatch.setattr(module, "_unfused", set())

    def compiled_run(fuses: bool) -> Any:
        asked.append(fuses)
        return module._run if fuses not in wrong else _fail if fails else _double

    monkeypatch.setattr(module, "_compiled_run", compiled_run)
    view, cache = _decoded_in_two_widths()
    reason = "no" if fails else "the captured pass gives other results"
    assert [record.message for record in caplog.records] == [f"LlamaForCausalLM: {line}{reason}" for line in logged]
    assert _compiled_passes(cache) == [len(wrong) == 1] * 2
    assert asked[0] and not asked[-1]
    assert not CompiledLayers(view, "model.layers").fuses  # nor are those of other views of such models

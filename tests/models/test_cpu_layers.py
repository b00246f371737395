"""Decoder layers in few calls on a CPU, and the pass around them, against the modules of transformers that they replace."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip import DraftPlan, Sampling, SpeculativeConfig, Target, TargetError, load_target
from layerskip.decoding.decode import decode
from layerskip.decoding.tree import TreeModel
from layerskip.drafters.registry import build_drafter
from layerskip.kernels import cpu
from layerskip.kernels.cpu import DecoderStack, has_kernels
from layerskip.models import cpu_pass, loading, packing
from layerskip.models.cache import KVCache
from layerskip.models.cpu_layers import _DecoderLayer, _Norm
from layerskip.models.forward import Features, forward
from layerskip.models.loading import load_draft
from layerskip.models.packing import few_rows_weight, set_packing
from layerskip.models.skip_view import decoding_view, shared_copy, skip_view
from tests.accelerator import DEVICE
from tests.drafters.contract import greedy_tokens
from tests.families import build
from tests.models.passes import tokens_of

pytestmark = pytest.mark.skipif(DEVICE != "cpu" or not has_kernels(), reason="needs a C++ compiler and AVX2 or AVX-512")
ALL = {_Norm, _DecoderLayer}


@pytest.fixture(autouse=True)
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs the small weights of tiny models, too."""
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(packing._LEAST, 1))


def in_bfloat16(family: str = "llama") -> PreTrainedModel:
    """A tiny float32 model whose weights are those of a bfloat16 checkpoint, unless its name says otherwise."""
    name, _, without = family.removesuffix(" in float32").partition(" without ")
    name, _, ignored = name.partition(" with ")
    kinds = {"layer_types": ("full_attention",)} if ("qwen" in name and without) or ignored else {}
    changes = kinds | ({"sliding_window": None} if without else {})
    model: PreTrainedModel = build(name, **changes)
    model = model if family.endswith("in float32") else model.bfloat16().float()
    set_packing(model, True)
    return model


def step(view: PreTrainedModel, times: int = 1) -> Tensor:
    """Returns the logits after two tokens; from the third time on, layers run in their forms."""
    cache = KVCache(view.config.num_hidden_layers, 64)
    with torch.inference_mode():
        forward(view, torch.tensor([7]), cache, 1)
        cache.length = 1
        for _ in range(times):
            logits = forward(view, torch.tensor([8]), cache, 1)
    return logits


def assert_alike(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def forms(view: PreTrainedModel) -> set[type[nn.Module]]:
    """The forms in which modules of a view run now."""
    layers = {_DecoderLayer for module in view.modules() if isinstance(module, _DecoderLayer) and module.state.is_right}
    return layers | {_Norm for module in view.modules() if isinstance(module, _Norm)}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of layers of each call."""
    numbers: list[int] = []
    compute = DecoderStack._run

    def counted(self: DecoderStack, *args: Any) -> Any:
        numbers.append(len(self.layers))
        return compute(self, *args)

    monkeypatch.setattr(DecoderStack, "_run", counted)
    return numbers


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", ALL),
        ("llama in float32", ALL),  # weights that bfloat16 does not hold
        ("qwen2", ALL),  # biases of queries, keys and values
        ("qwen3", ALL),  # norms of queries and keys
        ("gemma", ALL),  # another activation, norms by 1 + weight
        ("gemma3_text", ALL),  # and windows
        ("ministral", ALL),  # layers with the same positions, and in passes of several rows two masks
        ("olmo2", {_Norm}),  # norms before heads are split
        ("helium", {_Norm}),  # other rotary positions
        ("cohere", set()),
        ("phi3", {_Norm}),
    ],
)
def test_steps_equal_those_of_transformers(family: str, expected: set[type[nn.Module]], calls: list[int]) -> None:
    """From the first position on, where rotary positions of all forms are the same. At last, each layer is computed once."""
    model = in_bfloat16(family)
    view, cache, text = shared_copy(model), KVCache(model.config.num_hidden_layers, 64), tokens_of(40)
    with torch.inference_mode():
        reference = model(input_ids=text[None]).logits[0]
        for count in (1, 1, 1, 3, 1, 27, 2, 1):  # of them only 27 is no step
            start, _ = cache.length, calls.clear()
            logits = forward(view, text[start : start + count], cache, count)
            cache.length += count
            assert_alike(logits, reference[start : start + count])
    assert forms(view) == expected
    assert sum(calls) == (len(cache.layers) if expected == ALL else 0)


@pytest.mark.parametrize("family", ["llama", "llama in float32", "qwen3", "gemma3_text"])
@pytest.mark.usefixtures("threads")
def test_no_row_depends_on_the_others_bit_by_bit(family: str) -> None:
    model, text = in_bfloat16(family), tokens_of(40)
    view = decoding_view(model)
    step(view, 4)
    assert forms(view) == ALL
    with torch.inference_mode():
        for count in (2, 3, 5, 8, 16, 24):
            alone, together = (KVCache(model.config.num_hidden_layers, 64) for _ in range(2))
            for cache in (alone, together):
                forward(view, text[:30], cache, 1)
                cache.length = 10
            block = forward(view, text[10 : 10 + count], together, count)
            for row in range(count):
                assert torch.equal(forward(view, text[10 + row : 11 + row], alone, 1)[0], block[row])
                alone.length += 1


@pytest.mark.parametrize(
    ("family", "mask", "expected"),
    [
        ("llama", "", [4]),
        ("llama", "layers:1", [3]),
        ("llama", "attention:0;mlp:1", [4]),
        ("qwen3", "attention:1;mlp:1-2", [2, 1]),  # masks alternate, and a layer is skipped
        ("gemma3_text", "", [1, 1, 1, 1]),  # masks and positions alternate
        ("gemma3_text", "mlp:0;attention:1-2", [1, 1, 1, 1]),
    ],
)
def test_layers_with_the_same_inputs_share_a_call(family: str, mask: str, expected: list[int], calls: list[int]) -> None:
    """Also without the sub-layers that a mask skips."""
    model = in_bfloat16(family)
    view = skip_view(model, DraftPlan.parse(mask, 4))
    found = step(view)
    assert calls[-len(expected) :] == expected
    assert torch.equal(step(view), found)  # forms were known before the first text
    set_packing(model, False)
    assert_alike(found, step(skip_view(model, DraftPlan.parse(mask, 4))))


@pytest.mark.parametrize("changes_input", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_hooks_may_change_values_between_layers(changes_input: bool, in_place: bool, calls: list[int]) -> None:
    """Between layers that shared a call before."""
    model = in_bfloat16()
    view = shared_copy(model)
    step(view, 4)
    calls.clear()

    def changed(hidden: Tensor) -> Tensor:
        return hidden.mul_(1.5) if in_place else hidden * 1.5

    for tree in (model, view):
        layer = tree.model.layers[1]
        if changes_input:
            layer.register_forward_pre_hook(lambda _, args: (changed(args[0]), *args[1:]))
        else:
            layer.register_forward_hook(lambda _, args, output: changed(output))
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([[7, 8]])).logits[0, -1:]
    assert_alike(step(view), expected)
    assert len(calls) > 1


def test_modules_of_another_form_run_as_they_are() -> None:
    """An activation that is similar."""
    view = shared_copy(in_bfloat16())
    for layer in view.model.layers:
        layer.mlp.act_fn = nn.GELU()  # not its approximation by tanh
    step(view, 2)
    assert forms(view) == {_Norm}


def test_mixed_targets_are_float32_models_with_weights_of_bfloat16(tiny_folder: Path) -> None:
    mixed, plain = (load_target(str(tiny_folder), dtype=dtype, device="cpu") for dtype in ("mixed", "float32"))
    assert (mixed.dtype, mixed.precision, plain.precision) == ("float32", "mixed", "float32")
    for rounded, weight in zip(mixed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(rounded, weight.bfloat16().float())
    assert mixed.describe() == plain.describe() | {"weights": "bfloat16"}
    assert load_draft(mixed, str(tiny_folder)).precision == "mixed"
    with pytest.raises(TargetError, match="^target.dtype: mixed"):
        load_target(str(tiny_folder), dtype="mixed", quantization="torchao-int8")


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="bfloat16 is packed with AVX-512 only")
@pytest.mark.parametrize(
    ("flags", "memory", "precision"),
    [
        ({"avx512_bf16"}, 2**40, "mixed"),
        ({"avx512_bf16", "amx_bf16"}, 2**40, "bfloat16"),
        ({"avx512_bf16"}, 2**10, "bfloat16"),
    ],
)
def test_auto_is_mixed_without_matrix_units_and_with_enough_memory(
    flags: set[str], memory: int, precision: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "processor_flags", lambda: flags)
    monkeypatch.setattr(packing, "total_bytes", lambda: memory)
    target = load_target(str(tiny_folder), device="cpu")
    assert target.precision == precision
    assert target.digest == load_target(str(tiny_folder), dtype=precision, device="cpu").digest
    assert load_target(str(tiny_folder), device="cpu", pack_weights=False).precision == "bfloat16"


@pytest.mark.parametrize("through_data", [True, False])
def test_a_changed_weight_changes_the_next_step(through_data: bool) -> None:
    model = in_bfloat16()
    view = shared_copy(model)
    step(view, 4)
    assert forms(view) == ALL
    with torch.no_grad():
        for name in ("mlp.gate_proj", "self_attn.k_proj", *(() if through_data else ("input_layernorm",))):
            weight = model.get_submodule(f"model.layers.1.{name}").weight
            (weight.data if through_data else weight).mul_(2)
        packing.drop_stale_packing(view)  # as at the start of each generation
        assert_alike(step(view), model(input_ids=torch.tensor([[7, 8]])).logits[0, -1:])


def test_what_is_no_step_runs_as_it_is_and_what_is_not_finite_stays_so() -> None:
    model, texts = in_bfloat16(), torch.randint(3, 40, (2, 4))
    view, cache = shared_copy(model), KVCache(model.config.num_hidden_layers, 64)
    with torch.inference_mode():
        assert_alike(view(input_ids=texts).logits, model(input_ids=texts).logits)
        forward(view, tokens_of(30), cache, 1)
        cache.length = 30
        cache.buffers()[0][0, 0, 3, 0] = float("nan")  # a key
        assert forward(view, tokens_of(31)[30:], cache, 1).isnan().any()
    hidden = torch.randn(1, 2, model.config.hidden_size, requires_grad=True)
    found, expected = (torch.autograd.grad(each.model.layers[0].mlp(hidden).sum(), hidden) for each in (view, model))
    assert torch.allclose(found[0], expected[0])


@pytest.mark.parametrize("name", ["", ".self_attn", ".self_attn.q_norm", ".mlp.down_proj", ".mlp.act_fn"])
@pytest.mark.parametrize("is_hook", [True, False])
def test_hooks_and_replaced_forwards_of_parts_run(name: str, is_hook: bool) -> None:
    """Scans and trees replace forwards."""
    view, called = shared_copy(in_bfloat16("qwen3")), list[str]()
    step(view, 4)
    part = view.get_submodule(f"model.layers.1{name}")
    original = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return original(*args, **kwargs)

    if is_hook:
        part.register_forward_hook(lambda *_: called.append(name))
    else:
        part.forward = forward
    step(view)
    assert set(called) == {name}


@pytest.fixture
def own_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of the passes through the ``forward`` of models."""
    counts, compute = list[int](), nn.Module.__call__

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, PreTrainedModel) and "input_ids" in kwargs and "logits_to_keep" in kwargs:
            counts.append(kwargs["input_ids"].shape[1])
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", counted)
    return counts


@pytest.mark.parametrize(
    ("family", "is_usual"),
    [
        ("llama", True),
        ("qwen2", True),  # windows in every other layer
        ("qwen2 without windows", True),
        ("qwen3 without windows", True),
        ("mistral", True),  # windows in all layers
        ("mistral with layer types that it ignores", True),
        ("mistral without windows", True),
        ("gemma", True),
        ("gemma3_text", True),  # windows, with positions of their own
        ("ministral", True),
        ("granite", False),  # scaled logits
        ("phi3", False),  # layers of another form
    ],
)
def test_a_pass_of_the_usual_form_calls_no_forward_of_the_model(
    family: str, is_usual: bool, own_passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and features are those of that ``forward``, bit by bit."""
    monkeypatch.setattr(cpu_pass, "_AHEAD", 4)
    model, text = in_bfloat16(family), tokens_of(60)
    usual, own = shared_copy(model), shared_copy(model)
    vars(own).pop("cpu_pass", None)
    assert ("cpu_pass" in vars(usual)) == is_usual
    caches = [KVCache(model.config.num_hidden_layers, 64) for _ in range(2)]
    with torch.inference_mode():
        for view, cache in zip((usual, own), caches, strict=True):
            forward(view, text[:30], cache, 1, features=Features())
            cache.length = 30
        for view, cache in zip((usual, own), caches, strict=True):
            forward(view, text[30:31], cache, 1)
        own_passes.clear()
        for count, last in ((1, 0), (3, 2), (1, 0), (24, 1), (1, 1), (2, 1)):  # of which the table of positions holds 4
            if count == 2:
                for cache in caches:
                    cache.length = 33  # positions before those of the table
            results = []
            for view, cache in zip((usual, own), caches, strict=True):
                features, block = Features(), text[cache.length : cache.length + count]
                logits = forward(view, block, cache, last, features=features)
                cache.length += count
                results += [logits, features.states]
            assert torch.equal(results[0], results[2])
            assert torch.equal(results[1], results[3])
    # A pass of which all logits are wanted is not counted.
    assert own_passes == [count for count in (1, 3, 1, 24, 2) for _ in range(1 if is_usual else 2)]


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma3_text", "ministral"])
@pytest.mark.parametrize("count", [1, 3])
def test_windows_of_8_positions_begin_to_move_where_those_of_the_model_do(family: str, count: int) -> None:
    model, text = in_bfloat16(family), tokens_of(60)
    usual, own = shared_copy(model), shared_copy(model)
    vars(own).pop("cpu_pass")
    caches = [KVCache(model.config.num_hidden_layers, 64) for _ in range(2)]
    with torch.inference_mode():
        for start in (0, 5, *range(6, 30, count)):
            block = text[start : start + (5 if not start else count if start > 5 else 1)]
            results = []
            for view, cache in zip((usual, own), caches, strict=True):
                cache.length = start
                results.append(forward(view, block, cache, len(block)))
            assert torch.equal(*results)


@pytest.mark.parametrize("method", ["none", "prompt_lookup", "token_recycling", "lookahead", "layer_skip"])
def test_decoding_by_the_largest_logits_gives_the_tokens_of_generate(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are those of all logits, which some drafters learn from."""
    prompt, rounds = tokens_of(30).tolist(), []
    fields = {"mask": "attention:1"} if method == "layer_skip" else {}
    for least in (2**22, 1):
        monkeypatch.setattr(cpu, "_SCREENED", least)
        target = Target(in_bfloat16())
        drafter = build_drafter(SpeculativeConfig(method, **fields), target)
        for _ in range(2):  # some drafters learn
            result = decode(target, drafter, prompt, Sampling(), 20)
            assert result.tokens == greedy_tokens(target, prompt, max_new_tokens=20)
        rounds.append(result.stats.rounds)
        output = few_rows_weight(decoding_view(target.model).get_output_embeddings())
        assert output is not None and (output.screen is None) == (least > 1)
    assert rounds[0] == rounds[1]


def test_positions_that_depend_on_the_length_of_a_text_are_not_computed_ahead() -> None:
    """After 64 positions, all of them have another scaling."""
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model, text = build("llama", rope_parameters=scaling, max_position_embeddings=64).bfloat16().float(), tokens_of(40)
    set_packing(model, True)
    usual, own = shared_copy(model), shared_copy(model)
    assert "cpu_pass" in vars(usual)
    vars(own).pop("cpu_pass")
    caches = [KVCache(model.config.num_hidden_layers, 64) for _ in range(2)]
    with torch.inference_mode():
        for start, end in ((0, 30), (30, 31), (31, 32), (32, 35)):
            results = []
            for view, cache in zip((usual, own), caches, strict=True):
                results.append(forward(view, text[start:end], cache, 1))
                cache.length = end
            assert torch.equal(*results)


class Listener:
    """A hook without a hash, like a dataclass."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, called: list[str], name: str) -> None:
        self.called, self.name = called, name

    def __call__(self, *_: Any) -> None:
        self.called.append(self.name)


AROUND = ["", "model", "model.layers.2", "model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"]


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("is_hook", [True, False])
def test_hooks_and_replaced_forwards_run_from_the_next_pass_on(name: str, is_hook: bool) -> None:
    """Within a text."""
    view, called = shared_copy(in_bfloat16()), list[str]()
    cache, text = KVCache(view.config.num_hidden_layers, 64), tokens_of(40)
    part = view.get_submodule(name)
    original = part.forward
    with torch.inference_mode():
        for count in (30, 1, 1, 1):
            forward(view, text[cache.length : cache.length + count], cache, 1)
            cache.length += count
        if is_hook:
            part.register_forward_hook(Listener(called, name))
        else:
            part.forward = lambda *args, **kwargs: (called.append(name), original(*args, **kwargs))[1]
        for number in range(1, 4):
            forward(view, text[cache.length : cache.length + 1], cache, 1)
            assert called == [name] * number


def test_a_hook_of_all_modules_runs() -> None:
    view, called = shared_copy(in_bfloat16()), list[nn.Module]()
    step(view, 4)
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module))
    try:
        step(view, 3)
    finally:
        handle.remove()
    assert called.count(view) == 1 + 3


def test_a_view_that_nobody_holds_is_gone_at_once() -> None:
    view = shared_copy(in_bfloat16())
    step(view, 4)
    assert "cpu_pass" in vars(view)
    held = weakref.ref(view)
    gc.collect()
    gc.disable()
    try:
        del view
        assert held() is None
    finally:
        gc.enable()


def test_a_branch_of_a_tree_equals_plain_decoding_bit_by_bit(own_passes: list[int]) -> None:
    model, text = in_bfloat16(), tokens_of(40)
    view, tree, start = decoding_view(model), TreeModel(model), 30
    alone, together = (KVCache(model.config.num_hidden_layers, 64) for _ in range(2))
    step(view, 4)
    with torch.inference_mode():
        for cache in (alone, together):
            forward(view, text[:start], cache, 1)
            cache.length = start
        for _ in range(4):  # until layers run in their forms
            forward(view, text[start : start + 1], alone, 1)
            own_passes.clear()
            nodes = tree.run(text[start : start + 6], (-1, -1, 1, 0, 2), together)
        assert not own_passes
        for node in (0, 2, 3, 5):
            assert torch.equal(forward(view, text[start + node, None], alone, 1)[0], nodes[node])
            alone.length += 1


def test_a_copy_of_a_view_has_weights_of_its_own() -> None:
    view = shared_copy(in_bfloat16())
    before = step(view, 4)
    copied = copy.deepcopy(view)
    with torch.no_grad():
        copied.model.layers[1].mlp.up_proj.weight.mul_(2)
    assert not torch.allclose(step(copied, 4), before)
    assert_alike(step(view), before)

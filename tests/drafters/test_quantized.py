"""Drafting through a view of the target whose weights have fewer bits."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
import torch

from layerskip import ConfigError, DraftPlan, PromptSet, SpeculativeConfig, Target, UnsupportedModel
from layerskip.decoding.decode import decode
from layerskip.decoding.drafter import Drafter
from layerskip.decoding.sampling import Sampling
from layerskip.draft_plan import NAMES
from layerskip.drafters.quantized import Quantized
from layerskip.drafters.registry import build_drafter
from layerskip.kernels.cpu import Blocks, BlockWeight, IntegerWeight, has_kernels
from layerskip.measure.measure import Decoder, Task, interleave
from layerskip.models import packing
from layerskip.models.architecture import is_skipped
from layerskip.models.packing import few_rows_weight, set_packing
from layerskip.models.skip_view import cached_skip_view, copies_bytes, decoding_view
from searches.app.checks import InputError
from searches.space.search_space import SearchSpace
from searches.study.plan import drop_unsupported
from tests.accelerator import DEVICE
from tests.drafters.contract import contract, greedy_tokens
from tests.families import SKIPPABLE, build

pytestmark = pytest.mark.skipif(DEVICE != "cpu" or not has_kernels(), reason="needs a C++ compiler and AVX2 or AVX-512")


@pytest.fixture(autouse=True)
def small_weights() -> Iterator[None]:
    """Packs the small weights of tiny models, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_LEAST", dict.fromkeys(packing._LEAST, 1))
        yield


def _drafter(target: Target, weights: str = "int4", **fields: object) -> Drafter:
    set_packing(target.model, True)
    weights = weights if target.layers > 1 else "int4;head=int8"  # the toy has one layer
    given = {"method": "quantized", "weights": weights, "num_speculative_tokens": 3}
    return build_drafter(SpeculativeConfig.from_dict(given | fields), target)


MIXED = "int4;layers:1=skip;attention:0=int8;head=keep"

TestInt4 = contract(_drafter, samples_by_default=False)
TestMixed = contract(functools.partial(_drafter, weights=MIXED), samples_by_default=False)
TestSiblings = contract(functools.partial(_drafter, weights=MIXED, siblings=1), trees=True, samples_by_default=False)


@pytest.mark.parametrize("family", SKIPPABLE)
def test_greedy_tokens_of_every_family_equal_those_of_generate(family: str) -> None:
    """With formats, skips and a window that the output outgrows."""
    target = Target(build(family, eos_token_id=None))
    set_packing(target.model, True)
    prompt = [(7 * i) % 61 + 3 for i in range(9)]
    expected, reads_fewer = greedy_tokens(target, prompt, max_new_tokens=12), False
    for weights, window in (("int8", 0), ("int4;attention:0=skip;mlp:2=int8;head=keep", 2)):
        drafter = _drafter(target, weights, draft_window=window)
        assert decode(target, drafter, prompt, Sampling(), 12).tokens == expected
        layers = [module for module in cast(Quantized, drafter).view.modules() if isinstance(module, torch.nn.Linear)]
        reads_fewer |= any(isinstance(few_rows_weight(layer), IntegerWeight) for layer in layers)
    assert reads_fewer


@pytest.mark.parametrize(("bits", "share"), [(8, 0.2), (4, 0.8)])
def test_logits_of_a_view_are_near_those_of_the_target(bits: int, share: float) -> None:
    model = build("llama")
    set_packing(model, True)
    view, tokens = cached_skip_view(model, DraftPlan.uniform(len(model.model.layers), bits)), torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        found, expected = view(input_ids=tokens).logits, model(input_ids=tokens).logits
    error = float((found - expected).abs().mean() / expected.abs().mean())
    assert share / 50 < error < share
    layers = [module for module in view.modules() if isinstance(module, torch.nn.Linear)]
    assert all(isinstance(few_rows_weight(layer), IntegerWeight) for layer in layers)
    assert not any(isinstance(few_rows_weight(layer), BlockWeight) for layer in decoding_view(model).modules())
    assert cached_skip_view(model, DraftPlan.uniform(len(model.model.layers), bits)) is view
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)
        changed = cached_skip_view(model, DraftPlan.uniform(len(model.model.layers), bits))(input_ids=tokens).logits
    assert not torch.allclose(found, changed)


def test_every_sublayer_reads_the_bits_of_a_plan() -> None:
    model = build("llama")
    set_packing(model, True)
    view = cached_skip_view(model, DraftPlan.parse(MIXED, len(model.model.layers)))
    found = {}
    for name, module in view.named_modules():
        if isinstance(module, torch.nn.Linear):
            product = few_rows_weight(module)
            found[name] = product.bits if isinstance(product, IntegerWeight) else 0
    for name, bits in found.items():
        expected = 0 if name == "lm_head" or ".1." in name else 8 if ".0.self_attn" in name else 4
        assert bits == expected, name
    assert is_skipped(view.get_submodule("model.layers.1"))


@pytest.mark.parametrize("weights", ["int8", "int4;head=int8", MIXED])
def test_the_bytes_of_copies_are_those_that_the_view_reads(weights: str) -> None:
    """Before they are made and afterwards, and once for drafts that share them."""
    target = Target(build("llama", hidden_size=96, intermediate_size=80))
    set_packing(target.model, True)
    config = SpeculativeConfig.from_dict({"method": "quantized", "weights": weights})
    before = copies_bytes(target.model, config.plans(target.layers))
    view, expected = cast(Quantized, build_drafter(config, target)).view, {"int8": 0, "int4": 0}
    for module in view.modules():
        product = few_rows_weight(module)
        if isinstance(product, IntegerWeight):
            expected[NAMES[product.bits]] += sum(part.nbytes for part in product._kept.values())
    lookup = SpeculativeConfig("prompt_lookup", 2)
    twice = SpeculativeConfig("cascade", members=(lookup, config, replace(config, num_speculative_tokens=2)))
    assert before == copies_bytes(target.model, twice.plans(target.layers)) == expected
    contenders = {"plain": Decoder.of(target, SpeculativeConfig()), "draft": Decoder.of(target, twice)}
    prompts = PromptSet.of(["one"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "encode", lambda *_: [5, 6, 7])
        (row,) = interleave(target, prompts, contenders, Task(max_new_tokens=3))
    assert (row["plain"].copies_bytes, row["draft"].copies_bytes) == (0, sum(expected.values()))


def test_a_search_leaves_out_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    target = Target(build("llama"))
    set_packing(target.model, True)
    sizes = [sum(copies_bytes(target.model, [DraftPlan.uniform(target.layers, bits)]).values()) for bits in (4, 8)]
    space = SearchSpace(target.layers, methods=("quantized",), protect_first=0, protect_last=0, memory=sizes[0])
    assert [start.value("weights") for start in drop_unsupported(space, target).starts("quantized")] == ["int4", "int4"]
    less = replace(space, methods=("quantized", "prompt_lookup"), memory=sizes[0] - 1)
    assert drop_unsupported(less, target).available_methods == ("none", "prompt_lookup")
    line = f"quantized left out: copies of weights take {sizes[0]:,} bytes, and space.memory is {sizes[0] - 1:,}"
    assert line in capsys.readouterr().out
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"method": "quantized", "weights": "int3"}, "weights: cannot read 'int3'"),
        (
            {"method": "quantized", "weights": "layers:1"},
            "weights: 'layers:1' reads all bits; that is a mask",
        ),
        ({"method": "layer_skip", "mask": "int4"}, "mask: 'int4' reads fewer bits; that is a value of weights"),
    ],
)
def test_plans_that_a_method_cannot_read_are_refused(fields: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        SpeculativeConfig.from_dict(fields)


def test_a_plan_for_more_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="^weights: mlp layer 30 is out of range"):
        _drafter(Target(build("llama")), "int4;mlp:30=skip")


@pytest.mark.parametrize("width", [64, 96, 128, 7])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_the_nearest_ones(width: int, bits: int) -> None:
    weight = torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    weight[2] = 0.25  # all the same
    blocks = Blocks.quantize(weight, bits)
    size = width // blocks.scales.shape[1]
    assert size == {64: 64, 96: 32, 128: 64, 7: 1}[width]
    levels = torch.arange(2**bits) * blocks.scales.unsqueeze(-1) + blocks.offsets.unsqueeze(-1)
    nearest = (weight.view(5, -1, size, 1) - levels.unsqueeze(-2)).abs().amin(-1)
    assert torch.allclose((weight - blocks.values()).abs(), nearest.flatten(1), atol=1e-6)
    low, high = weight.view(5, -1, size).aminmax(dim=-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-9)
    of_range = ((weight.view(5, -1, size) - low) / step).round() * step + low - weight.view(5, -1, size)
    share = float(nearest.square().sum() / of_range.square().sum().clamp_min(1e-6))
    assert share < (1 if size == 1 else 0.97 if bits == 4 else 1.05)  # rounding to float16 costs more at 8 bits
    assert torch.equal(blocks.scales.half().float(), blocks.scales)


def test_one_important_input_leaves_the_others_their_range() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    importance = torch.full((64,), 1e-9)
    importance[5] = 1.0
    errors = (Blocks.quantize(weight, 4, importance).values() - weight).abs()
    assert float(errors[:, 5].amax()) < 0.05
    assert float(errors.amax()) < 1.0  # a fifth of the range
    assert float(errors.mean()) < 0.2


def test_weights_that_no_token_reaches_are_asked_for_once() -> None:
    model = build("llama")
    set_packing(model, True)
    model.extra = torch.nn.Linear(32, 32)
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    for plan in ("int4", "int8", "int4;mlp:1=skip"):
        cached_skip_view(model, DraftPlan.parse(plan, len(model.model.layers)))
    own = passes.copy()
    packing.weigh_inputs(model)
    assert passes == own


def test_copies_keep_what_large_inputs_meet() -> None:
    """The products of every layer with what a text gives it are nearer than those of codes that weigh all inputs alike."""
    model = build("llama")
    set_packing(model, True)
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[::8] *= 10
    cached_skip_view(model, DraftPlan.uniform(len(model.model.layers), 4))
    assert not any(module._forward_pre_hooks for module in model.modules())
    inputs: dict[torch.nn.Linear, torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda own, args: inputs.update({own: args[0].double()}))
    with torch.no_grad():
        model(input_ids=torch.arange(3, 51)[None])
    errors = []
    for module, hidden in inputs.items():
        weight = module.weight.detach()
        exact = hidden @ weight.double().T
        for blocks in (packing._blocks(module.weight, 4), Blocks.quantize(weight, 4)):
            error = hidden @ blocks.values().double().T - exact
            errors.append(float(error.square().sum() / exact.square().sum()))
    weighed, alike = sum(errors[::2]), sum(errors[1::2])
    assert weighed < 0.8 * alike


@pytest.mark.parametrize(
    ("dtype", "packs", "kernels", "reason"),
    [
        (torch.float32, False, True, "its weights are not packed on a CPU"),
        (torch.float32, True, False, r"it needs a C\+\+ compiler"),
        (torch.bfloat16, True, True, "its arithmetic is not float32"),
    ],
)
def test_targets_without_faster_products_are_refused(
    dtype: torch.dtype,
    packs: bool,
    kernels: bool,
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("bfloat16 is packed with AVX-512 only")
    target = Target(build("llama").to(dtype))
    set_packing(target.model, packs)
    monkeypatch.setattr(packing, "has_kernels", lambda: kernels)
    with pytest.raises(UnsupportedModel, match=f"^quantized: {reason}"):
        build_drafter(SpeculativeConfig("quantized"), target)
    space = SearchSpace(layers=target.layers, protect_first=1, protect_last=1)
    kept = drop_unsupported(space, target)
    assert set(space.available_methods) - set(kept.available_methods) == {"quantized"}
    assert re.match(f"space.methods: quantized left out: {reason}", capsys.readouterr().out)
    with pytest.raises(InputError, match="^space.methods: the target supports none of quantized"):
        drop_unsupported(replace(space, methods=("quantized",)), target)

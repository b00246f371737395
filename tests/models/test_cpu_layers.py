"""Decoder layers in few calls on a CPU, against the modules of transformers that they replace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from layerskip import TargetError, load_target
from layerskip.kernels.cpu import has_kernels
from layerskip.models import packing
from layerskip.models.cache import KVCache
from layerskip.models.cpu_layers import _Attention, _Form, _GatedMLP, _Norm
from layerskip.models.forward import forward
from layerskip.models.loading import load_draft
from layerskip.models.packing import set_packing
from layerskip.models.skip_view import decoding_view, shared_copy
from tests.families import build

pytestmark = pytest.mark.skipif(not has_kernels(), reason="needs a C++ compiler and AVX2, AVX-512 or NEON")
ALL = {_Attention, _GatedMLP, _Norm}
_ROOM = 64


@pytest.fixture(autouse=True)
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs the small weights of tiny models, too."""
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(packing._LEAST, 1))


def in_bfloat16(family: str) -> PreTrainedModel:
    """A tiny float32 model whose weights are those of a bfloat16 checkpoint."""
    model: PreTrainedModel = build(family).bfloat16().float()
    set_packing(model, True)
    return model


def forms(view: PreTrainedModel) -> set[type[_Form]]:
    """The forms in which modules of a view run now."""
    used = (module for module in view.modules() if isinstance(module, _Form))
    return {type(module).__mro__[1] for module in used if module.__dict__.get("_variant", -1) not in (-1, None)}


@pytest.mark.parametrize("first", [1, 5])  # at the first position, rotary positions of all forms are the same
@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", ALL),
        ("qwen2", ALL),  # biases of queries, keys and values
        ("qwen3", ALL),  # norms of queries and keys
        ("gemma", ALL),  # another activation, norms by 1 + weight
        ("gemma3_text", ALL),  # and windows
        ("granite", ALL),
        ("olmo2", {_GatedMLP, _Norm}),  # norms before heads are split
        ("helium", {_GatedMLP, _Norm}),  # other rotary positions
        ("glm", {_Norm}),
        ("exaone4", ALL),  # some layers without positions
        ("cohere", {_GatedMLP}),
        ("phi3", {_Norm}),
        ("gpt2", set()),
    ],
)
def test_steps_equal_those_of_transformers(family: str, expected: set[type[_Form]], first: int) -> None:
    model = in_bfloat16(family)
    view, cache = decoding_view(model), KVCache(model.config.num_hidden_layers, _ROOM)
    text = torch.randint(3, model.get_input_embeddings().weight.shape[0], (40,))
    with torch.inference_mode():
        reference = model(input_ids=text[None]).logits[0]
        for count in (first, 1, 1, 3, 1, 27, 2):  # of them only 27 is no step
            start = cache.length
            logits = forward(view, text[start : start + count], cache, count)
            cache.length += count
            assert torch.allclose(logits, reference[start : start + count], rtol=1e-4, atol=1e-4)
    assert forms(view) == expected


@torch.inference_mode()
def test_batches_run_as_they_are() -> None:
    model = in_bfloat16("llama")
    view, texts = decoding_view(model), torch.randint(3, 40, (2, 4))
    for _ in range(2):
        forward(view, texts[0], KVCache(model.config.num_hidden_layers, _ROOM), 1)
    assert torch.allclose(view(input_ids=texts).logits, model(input_ids=texts).logits, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["mlp.down_proj", "mlp.act_fn", "self_attn.k_proj", "self_attn.q_norm"])
def test_hooks_of_parts_are_called(name: str) -> None:
    model = in_bfloat16("qwen3")
    view, called = shared_copy(model), list[str]()
    for _ in range(3):
        forward(view, torch.tensor([7, 8]), KVCache(model.config.num_hidden_layers, _ROOM), 1)
    view.get_submodule(f"model.layers.1.{name}").register_forward_hook(lambda *_: called.append(name))
    forward(view, torch.tensor([7]), KVCache(model.config.num_hidden_layers, _ROOM), 1)
    assert called == [name]


def test_similar_activations_are_told_apart() -> None:
    model = in_bfloat16("llama")
    view = shared_copy(model)
    for layer in view.model.layers:
        layer.mlp.act_fn = nn.GELU()  # not its approximation by tanh
    with torch.inference_mode():
        for _ in range(2):
            forward(view, torch.tensor([7, 8]), KVCache(model.config.num_hidden_layers, _ROOM), 1)
    assert _GatedMLP not in forms(view)


def test_mixed_targets_are_float32_models_with_weights_of_bfloat16(tiny_folder: Path) -> None:
    mixed, plain = (load_target(str(tiny_folder), dtype=dtype, device="cpu") for dtype in ("mixed", "float32"))
    assert (mixed.dtype, mixed.precision, plain.precision) == ("float32", "mixed", "float32")
    for rounded, weight in zip(mixed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(rounded, weight.bfloat16().float())
    assert mixed.describe() == plain.describe() | {"weights": "bfloat16"}
    assert load_draft(mixed, str(tiny_folder)).precision == "mixed"
    with pytest.raises(TargetError, match="^target.dtype: mixed"):
        load_target(str(tiny_folder), dtype="mixed", quantization="torchao-int8")


def test_weights_that_bfloat16_does_not_hold_keep_the_modules() -> None:
    model = build("llama")
    set_packing(model, True)
    assert not any(isinstance(module, _Form) for module in decoding_view(model).modules())


def test_a_changed_weight_changes_the_next_step() -> None:
    model = in_bfloat16("llama")
    view, token = shared_copy(model), torch.tensor([7])

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return forward(view, token, KVCache(model.config.num_hidden_layers, _ROOM), 1)

    for _ in range(2):
        logits()
    with torch.no_grad():
        for name in ("mlp.gate_proj", "self_attn.k_proj", "input_layernorm"):
            model.get_submodule(f"model.layers.1.{name}").weight.mul_(2)
    with torch.inference_mode():
        expected = model(input_ids=token[None]).logits[0]
    assert torch.allclose(logits(), expected, rtol=1e-4, atol=1e-4)


def test_gradients_flow_as_before() -> None:
    model = in_bfloat16("llama")
    view = shared_copy(model)
    with torch.inference_mode():
        for _ in range(2):
            forward(view, torch.tensor([7]), KVCache(model.config.num_hidden_layers, _ROOM), 1)
    hidden = torch.randn(1, 2, model.config.hidden_size, requires_grad=True)
    view.model.layers[0].mlp(hidden).sum().backward()
    found, hidden.grad = hidden.grad, None
    model.model.layers[0].mlp(hidden).sum().backward()
    assert found is not None
    assert hidden.grad is not None
    assert torch.allclose(found, hidden.grad)

"""What surrounds products moves into their kernels: the results stay, and a layer launches few kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache
from layerskip.models.compiled_layers import set_compiling
from layerskip.models.forward import forward
from layerskip.models.packing import set_packing
from layerskip.models.skip_view import decoding_view
from tests.accelerator import DEVICE
from tests.exhaustive import EXHAUSTIVE, representative
from tests.families import build, config
from tests.models.compilers import compile_for_gpu, rewrite_only

PROMPT = 12
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="stands in for a GPU")


def _run(model: PreTrainedModel, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a compiled pass over ``width`` tokens and of the same pass as it is."""
    set_compiling(model, "on")
    view = decoding_view(model)
    tokens = torch.randint(3, 64, (PROMPT + width,), generator=torch.Generator().manual_seed(0))
    found = []
    with torch.inference_mode():
        layers = model.config.num_hidden_layers
        for cache in (acquire_cache(model, layers, 60, torch.device("cpu"), True), KVCache(layers, 60)):
            forward(view, tokens[:PROMPT], cache, last=1)
            cache.length = PROMPT
            found.append(forward(view, tokens[PROMPT:], cache, last=width))
    return found[0], found[1]


def _fused(graph: Any) -> Counter[str]:
    """Return what the products of a graph do besides multiplying, and how many do."""
    counts: Counter[str] = Counter()
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.layerskip.few_rows_linear.default):
        given = dict(zip(("residual", "gate", "norm"), node.args[2:5], strict=False))
        counts.update(name if name == "residual" else str(value) for name, value in given.items() if value not in (None, ""))
    return counts


@pytest.mark.parametrize(
    ("family", "fused"),
    representative(
        [("llama", {"llama": 2, "silu": 1, "residual": 2}), ("gemma3_text", {"gemma": 2, "gelu_tanh": 1})],
        [("qwen3", {"llama": 2, "silu": 1, "residual": 2})],
    ),
)
def test_rewritten_layers_compute_the_same(family: str, fused: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family)
    graphs = rewrite_only(monkeypatch)
    for width in (8, 1):
        actual, expected = _run(model, width)
        torch.testing.assert_close(actual, expected, rtol=0, atol=float(expected.abs().max()) * 3e-5)
    assert [_fused(graph) for graph in graphs] == [fused] * (len(graphs) // 2) + [{}] * (len(graphs) // 2)
    assert not any(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default) for graph in graphs)


class _OperatorCounter(TorchDispatchMode):
    """Counts operators that compute, each of which is at least one kernel."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.count += not func.is_view and "detach" not in func.name() and "empty" not in func.name()
        return result


# Published models: family, width, width of the MLP, heads, heads of keys, width of a head, and the kernels of a layer.
SHAPES = {
    "Llama 3.2 1B": ("llama", 2048, 8192, 32, 8, 64, 6),
    "Llama 3.2 3B": ("llama", 3072, 8192, 24, 8, 128, 6),
    "Llama 3.1 8B": ("llama", 4096, 14336, 32, 8, 128, 6),
    "Llama 3.1 70B": ("llama", 8192, 28672, 64, 8, 128, 6),
    "Qwen3 0.6B": ("qwen3", 1024, 3072, 16, 8, 128, 6),
    "Qwen3 8B": ("qwen3", 4096, 12288, 32, 8, 128, 6),
    "Qwen3 14B": ("qwen3", 5120, 17408, 40, 8, 128, 6),
    "Gemma 3 4B": ("gemma3_text", 2560, 10240, 8, 4, 256, 8),
    "Gemma 3 27B": ("gemma3_text", 5376, 21504, 32, 16, 128, 8),
}


def _zeros(family: str, hidden: int, intermediate: int, heads: int, key_heads: int, width: int) -> PreTrainedModel:
    """Return a model of one layer in bfloat16. Zeros take no memory before they are written."""
    fields = dict(hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads, head_dim=width)
    fields |= dict(num_key_value_heads=key_heads, num_hidden_layers=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(family, **fields), dtype=torch.bfloat16)
    model._apply(lambda part: torch.zeros(part.shape, dtype=part.dtype))
    set_packing(model, False)  # as on a GPU
    return model.eval()


def _counted(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> tuple[set[int], float]:
    """Return the kernels of the compiled layers, for a chain and for one token, and the operators of a layer as it is."""
    with _OperatorCounter() as operators, torch.inference_mode():
        model(torch.tensor([[3, 4]]), use_cache=False)
    launches = compile_for_gpu(monkeypatch)
    for width in (8, 1):
        _run(model, width)
    assert len(launches) >= 2
    return {len(layer) for layer in launches}, operators.count / model.config.num_hidden_layers


@pytest.mark.parametrize(("family", "maximum"), representative([("llama", 6), ("gemma3_text", 8)], [("qwen3", 6)]))
def test_a_layer_launches_at_max_eight_kernels_on_a_gpu(family: str, maximum: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An uncompiled layer launches several times as many."""
    kernels, operators = _counted(build(family).to(torch.bfloat16), monkeypatch)
    assert kernels == {maximum}
    assert operators > 3 * maximum


@pytest.mark.skipif(not EXHAUSTIVE, reason="the layers run on the CPU, too; run by make lossless")
@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_of_a_published_model_launches_as_few(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *shape, maximum = SHAPES[name]
    assert _counted(_zeros(*shape), monkeypatch)[0] == {maximum}

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













"""What surrounds products moves into their kernels, and the results stay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from layerskip.models.compiled_layers import set_compiling
from layerskip.models.forward import forward
from layerskip.models.skip_view import decoding_view
from tests.accelerator import DEVICE
from tests.exhaustive import representative
from tests.families import build
from tests.models.compilers import rewrite_only
from tests.models.passes import acquired, assert_close, filled, tokens_of

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="stands in for a GPU")


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
    set_compiling(model, "on")
    graphs = rewrite_only(monkeypatch)
    for width in (8, 1):
        view, tokens = decoding_view(model), tokens_of(12 + width)
        with torch.inference_mode():
            both = filled(acquired(model, 60), view, tokens[:12], 60)
            assert_close(*(forward(view, tokens[12:], cache, last=width) for cache in both))
    assert [_fused(graph) for graph in graphs] == [fused] * (len(graphs) // 2) + [{}] * (len(graphs) // 2)
    assert graphs
    assert not any(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default) for graph in graphs)

"""What surrounds products moves into their kernels: the results stay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.accelerator import DEVICE
from tests.exhaustive import representative
from tests.families import build
from tests.models.compilers import rewrite_only, run_compiled

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="stands in for a GPU")


def _fused(graph: Any) -> Counter[str]:
    """Return what the products of a graph do besides multiplying, and how many do."""
    counts: Counter[str] = Counter()
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.layerskip.few_rows_linear.default):
        given = dict(zip(("residual", "gate", "norm"), node.args[2:5], strict=False))
        counts.update(name if name == "residual" else str(value) for name, value in given.items() if value not in (None, ""))
    return counts


@pytest.mark.parametrize(
    ("family", "dtype", "fused"),
    representative(
        [
            ("llama", torch.bfloat16, {"llama": 2, "silu": 1, "residual": 2}),
            ("gemma3_text", torch.float32, {"gemma": 2, "gelu_tanh": 1}),
        ],
        [("qwen3", torch.float32, {"llama": 2, "silu": 1, "residual": 2})],
    ),
)
def test_rewritten_layers_compute_the_same(
    family: str, dtype: torch.dtype, fused: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family).to(dtype)
    graphs = rewrite_only(monkeypatch)
    tolerance = 3e-5 if dtype == torch.float32 else 6e-2
    for width in (8, 1):
        actual, expected = run_compiled(model, width)
        torch.testing.assert_close(actual, expected, rtol=0, atol=float(expected.abs().max()) * tolerance)
    assert [_fused(graph) for graph in graphs] == [fused] * (len(graphs) // 2) + [{}] * (len(graphs) // 2)
    assert not any(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default) for graph in graphs)


def test_a_longer_cache_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts need caches of several lengths, and a compilation takes seconds."""
    model = build("llama", max_position_embeddings=4096)
    graphs, compiled = rewrite_only(monkeypatch), []
    for positions in (60, 600, 1500):  # caches of 512, 1024 and 2048 positions
        for width in (8, 1):
            actual, expected = run_compiled(model, width, positions)
            torch.testing.assert_close(actual, expected, rtol=0, atol=float(expected.abs().max()) * 3e-5)
        compiled.append(len(graphs))
    assert compiled[0] == compiled[-1]

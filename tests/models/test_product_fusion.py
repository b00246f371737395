"""What surrounds products moves into their kernels: the results stay, and a layer launches few kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from tests.accelerator import DEVICE
from tests.exhaustive import EXHAUSTIVE, representative
from tests.families import build
from tests.models.compilers import compile_for_gpu, rewrite_only
from tests.models.published import SHAPES, layer_of, run_compiled

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
    graphs = rewrite_only(monkeypatch)
    for width in (8, 1):
        actual, expected = run_compiled(model, width)
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


def _counted(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> tuple[set[int], float]:
    """Return the kernels of the compiled layers, for a chain and for one token, and the operators of a layer as it is."""
    with _OperatorCounter() as operators, torch.inference_mode():
        model(torch.tensor([[3, 4]]), use_cache=False)
    launches = compile_for_gpu(monkeypatch)
    for width in (8, 1):
        run_compiled(model, width)
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
    assert _counted(layer_of(name), monkeypatch)[0] == {SHAPES[name][-1]}


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

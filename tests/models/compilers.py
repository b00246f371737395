"""A stand-in for the compiler of layers, on a machine without a GPU: they run as a pass of the compiler rewrites them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch.fx import GraphModule

from layerskip.kernels import product_fusion
from layerskip.models import compiled_layers

_Backend = Callable[[GraphModule, list[Any]], Callable[..., Any]]


def rewrite_only(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """Run layers as the pass of the compiler rewrites them for a GPU, until the test ends.

    Returns:
        A list to which each rewritten layer is appended.
    """
    graphs: list[GraphModule] = []

    def backend(options: dict[str, Any]) -> _Backend:
        def rewrite(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            with V.set_fake_mode(detect_fake_mode(inputs)):
                options["post_grad_custom_pre_pass"](graph.graph)
            graph.recompile()
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        def compile_graph(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            return aot_module_simplified(graph, inputs, fw_compiler=rewrite, decompositions=select_decomp_table())

        return compile_graph

    def compile_as(run: Callable[..., Any], options: dict[str, Any], **kwargs: Any) -> Callable[..., Any]:
        return compile_plainly(run, backend=backend(options), **kwargs)

    compile_plainly = torch.compile
    monkeypatch.setattr(torch, "compile", compile_as)
    compiled_run = functools.cache(compiled_layers._compiled_run.__wrapped__)  # not kept beyond the test
    monkeypatch.setattr(compiled_layers, "_compiled_run", compiled_run)
    monkeypatch.setattr(compiled_layers, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(compiled_layers, "has_kernel", lambda weight: True)
    monkeypatch.setattr(product_fusion, "runs_on_gpu", lambda graph: True)
    return graphs

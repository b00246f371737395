"""A stand-in for the compiler of layers on a machine without a GPU, and compiled passes.

Layers are traced on the CPU as they would be on a GPU, and run as a pass of the compiler has rewritten them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from transformers import PreTrainedModel

from layerskip.kernels import product_fusion
from layerskip.models import compiled_layers
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache
from layerskip.models.forward import forward
from layerskip.models.skip_view import decoding_view
from tests.models.passes import tokens_of

PROMPT = 12


def rewrite_only(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """Run layers as the pass of the compiler rewrites them for a GPU, until the test ends.

    Returns:
        A list to which each rewritten layer is appended.
    """
    graphs: list[GraphModule] = []

    def compile_as(run: Callable[..., Any], options: dict[str, Any], **kwargs: Any) -> Callable[..., Any]:
        def rewrite(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            with V.set_fake_mode(detect_fake_mode(inputs)):
                options["post_grad_custom_pre_pass"](graph.graph)
            graph.recompile()
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        def compile_graph(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            return aot_module_simplified(graph, inputs, fw_compiler=rewrite, decompositions=select_decomp_table())

        return compile_plainly(run, backend=compile_graph, **kwargs)

    compile_plainly = torch.compile
    monkeypatch.setattr(torch, "compile", compile_as)
    compiled_run = functools.cache(compiled_layers._compiled_run.__wrapped__)  # not kept beyond the test
    monkeypatch.setattr(compiled_layers, "_compiled_run", compiled_run)
    monkeypatch.setattr(compiled_layers, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(compiled_layers, "has_kernel", lambda weight: True)
    monkeypatch.setattr(product_fusion, "runs_on_gpu", lambda graph: True)
    return graphs


def run_compiled(model: PreTrainedModel, width: int, positions: int = 60) -> tuple[Tensor, Tensor]:
    """Return the logits of a compiled pass over ``width`` tokens and of the same pass as it is, on caches for positions."""
    view, tokens, found = decoding_view(model), tokens_of(PROMPT + width), []
    with torch.inference_mode():
        layers = model.config.num_hidden_layers
        for cache in (acquire_cache(model, layers, positions, torch.device("cpu"), True), KVCache(layers, positions)):
            forward(view, tokens[:PROMPT], cache, last=1)
            cache.length = PROMPT
            found.append(forward(view, tokens[PROMPT:], cache, last=width))
    return found[0], found[1]

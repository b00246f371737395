"""Stand-ins for the compiler of layers, on a machine without a GPU.

Layers are traced on the CPU as they would be on a GPU, and run as they are or as a pass of the compiler has rewritten them.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.device_interface as interface
import torch._inductor.scheduler
import torch.utils._triton
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from layerskip.kernels import product_fusion
from layerskip.models import compiled_layers

_LAUNCH = re.compile(r" +(?:\w+\.run\(|extern_kernels\.|(?:\w+ = )?torch\.ops\.)")
_H100 = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, total_memory=80 * 2**30, gcnArchName="",
)  # fmt: skip
_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '{3}\n(.*?)'{3}", re.DOTALL)
_GPU = torch.device("cuda:0")
_Backend = Callable[[GraphModule, list[Any]], Callable[..., Any]]


class _Written(BaseException):
    """Inductor has written its code."""


def compile_for_gpu(monkeypatch: pytest.MonkeyPatch, kernels: list[tuple[str, str]] | None = None) -> list[list[str]]:
    """Compile layers as for an H100 until the test ends, and run them as they are.

    Inductor gets the same operators for tensors that are said to be on the GPU, and its code is kept.

    Args:
        monkeypatch: undoes it.
        kernels: gets the name and the code of each kernel that Inductor writes.

    Returns:
        A list to which the launches of each compiled layer are appended.
    """
    launches: list[list[str]] = []

    def write(lowering: GraphLowering) -> None:
        code = lowering.codegen()[0].value  # type: ignore[union-attr]
        launches.append([line.strip() for line in code.splitlines() if _LAUNCH.match(line)])
        if kernels is not None:
            kernels.extend(_KERNEL.findall(code))
        raise _Written

    def compile_there(graph: GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        for node in graph.graph.nodes:
            if node.kwargs.get("device") is not None:
                node.kwargs = node.kwargs | {"device": _GPU}
        with V.fake_mode:
            there = [_on_gpu(given) for given in inputs]
        FakeTensorProp(graph, V.fake_mode).propagate_dont_convert_inputs(*there)
        return compile_fx_inner(graph, there, **kwargs)

    def backend(options: dict[str, Any]) -> _Backend:
        def compile_graph(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            with contextlib.suppress(_Written):
                patches = options | {"force_disable_caches": True}
                compile_fx(graph, inputs, inner_compile=compile_there, config_patches=patches)
            return graph.forward

        return compile_graph

    _compile_with(monkeypatch, backend)
    monkeypatch.setattr(GraphLowering, "_compile_to_module", write)
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda pool: False)  # it would compile for a GPU that is there
    monkeypatch.setattr(torch._inductor.scheduler, "has_triton", lambda: True)
    monkeypatch.setattr(torch.utils._triton, "triton_hash_with_backend", lambda *_: "")
    monkeypatch.setattr(interface.CudaInterface, "get_device_properties", staticmethod(lambda *_: _H100))
    monkeypatch.setattr(interface.CudaInterface, "is_bf16_supported", staticmethod(lambda *_, **__: True))
    monkeypatch.setitem(interface.caching_worker_device_properties, "cuda", [_H100])
    monkeypatch.setitem(interface.caching_worker_current_devices, "cuda", 0)
    for name, value in (("get_device_properties", _H100), ("get_device_capability", (9, 0)), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    return launches


def _on_gpu(given: Any) -> Any:
    if not isinstance(given, Tensor):
        return given
    return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=_GPU)


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

    _compile_with(monkeypatch, backend)
    monkeypatch.setattr(product_fusion, "runs_on_gpu", lambda graph: True)
    return graphs


def _compile_with(monkeypatch: pytest.MonkeyPatch, backend: Callable[[dict[str, Any]], _Backend]) -> None:
    def compile_as(run: Callable[..., Any], options: dict[str, Any], **kwargs: Any) -> Callable[..., Any]:
        return compile_plainly(run, backend=backend(options), **kwargs)

    compile_plainly = torch.compile
    monkeypatch.setattr(torch, "compile", compile_as)
    compiled_run = functools.cache(compiled_layers._compiled_run.__wrapped__)  # not kept beyond the test
    monkeypatch.setattr(compiled_layers, "_compiled_run", compiled_run)
    monkeypatch.setattr(compiled_layers, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(compiled_layers, "has_kernel", lambda weight: True)

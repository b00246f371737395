"""Where the time of a pass goes, and what kernels of a GPU take beside torch's operators."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from layerskip.costs.timing import seconds_of
from layerskip.device.trial import queued_seconds
from layerskip.kernels.cpu import PARTS, has_kernels, time_parts
from layerskip.kernels.decode_attention import attend_on_gpu, attend_plainly
from layerskip.kernels.few_rows_linear import multiply_on_gpu, multiply_plainly
from layerskip.models.cache_pool import acquire_cache
from layerskip.models.forward import forward
from layerskip.models.graph_capture import capture_seconds
from layerskip.models.prefill import run_prefill
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target

ROWS = (1, 4, 16)
"""Tokens of the passes and rows of the products that are timed."""
_PASSES = 24
_SLOWEST = 10  # kernels that are named
_KEYS = (512, 4096)  # of the attention that is timed
_PRODUCTS = re.compile(r"::(addmm|mm|linear|_linear_pointwise|mkldnn_linear)")


@torch.inference_mode()
def time_pass(target: Target, rows: int, context: int, captured: bool = True) -> dict[str, Any]:
    """Return the mean milliseconds of a pass over ``rows`` tokens after ``context`` others, and of its parts.

    On a CPU, these are :data:`~layerskip.kernels.cpu.PARTS`, the mean of the threads of our kernels with what torch's
    profiler says of operators outside them, which is a little too much; and Python, the rest of the pass. On a GPU, they are
    kernels, of which the slowest are named.
    """
    device, before, on_gpu = target.device, capture_seconds(), target.device.type == "cuda"
    cache = acquire_cache(target.model, target.layers, context + rows, device, None if captured else False)
    view, tokens = decoding_view(target.model), torch.arange(context, device=device) % target.vocabulary
    run_prefill(view, tokens, cache)

    def milliseconds() -> float:
        job = partial(forward, view, tokens[:rows], cache, last=rows)
        return sum(1e3 * seconds_of(device, job) for _ in range(_PASSES)) / _PASSES

    milliseconds()  # captures, and warms up
    with time_parts() if not on_gpu and has_kernels() else contextlib.nullcontext(dict[str, float]) as seconds:
        row: dict[str, Any] = {"milliseconds": milliseconds()}
        parts = {name: 1e3 * value / _PASSES for name, value in (dict.fromkeys(PARTS, 0.0) | seconds()).items()}
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiled:
        milliseconds()
    events: list[Any] = list(profiled.key_averages())
    if on_gpu:
        kernels = sorted((e for e in events if e.device_type.name == "CUDA"), key=lambda e: -e.self_device_time_total)
        return row | {
            "capture_seconds": capture_seconds() - before,
            "kernels": sum(event.count for event in kernels) / _PASSES,
            "kernels_milliseconds": sum(event.self_device_time_total for event in kernels) / 1e3 / _PASSES,
            "slowest_microseconds": {e.key[:60]: e.self_device_time_total / _PASSES for e in kernels[:_SLOWEST]},
        }
    for event in events:
        name = "products" if _PRODUCTS.search(event.key) else "attention" if "attention" in event.key else "other operators"
        parts[name] += event.self_cpu_time_total / 1e3 / _PASSES
    return row | parts | {"Python": row["milliseconds"] - sum(parts.values())}


def time_kernels(
    config: Any, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield our kernels for the shapes of a model's configuration by name, each with its measurement.

    A measurement has for each number of rows, and for attention also of keys, the microseconds of the kernel, those of
    torch's operators, and the GB/s that the kernel reads.
    """
    hidden, inner, heads, groups = (
        config.get(f) for f in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    if None in (hidden, inner, heads, groups):
        return  # of a model of another form
    width, draw = config.get("head_dim") or hidden // heads, partial(torch.randn, dtype=dtype, device=device)

    def product(outputs: int, inputs: int, gate: str = "", norm: str = "", adds: bool = False) -> dict[str, Any]:
        weight, scale = draw(outputs, inputs) / inputs**0.5, draw(inputs) if norm else None
        given = {n: (draw(n, inputs), weight, draw(n, outputs) if adds else None, gate, norm, scale, 1e-5) for n in ROWS}
        return {str(n): _beside(multiply_on_gpu, multiply_plainly, each) for n, each in given.items()}

    def attention() -> dict[str, Any]:
        found = {}
        for n, length in itertools.product(ROWS, _KEYS):
            queries, seen = draw(1, n, heads, width).transpose(1, 2), torch.ones(1, 1, n, length, dtype=torch.bool)
            given = queries, *draw(2, 1, groups, length, width), seen.tril(length - n).to(device), width**-0.5
            found[f"{n} to {length}"] = _beside(attend_on_gpu, attend_plainly, given)
        return found

    yield "attention", attention
    yield "queries, keys and values", partial(product, (heads + 2 * groups) * width, hidden, norm="llama")
    yield "output of attention", partial(product, hidden, heads * width, adds=True)
    yield "gate and up", partial(product, 2 * inner, hidden, "silu", "llama")
    yield "down", partial(product, hidden, inner, adds=True)
    yield "output layer", partial(product, config.get("vocab_size"), hidden)


def _beside(kernel: Callable[..., Tensor], operators: Callable[..., Tensor], given: Sequence[Any]) -> dict[str, float]:
    """Return the times of both: on a GPU without launches, and with weights that are not in its cache."""
    device, found = given[0].device, list[float]()
    for compute in (kernel, operators):
        compute(*given)
        on_cpu = device.type == "cpu"  # where tests interpret kernels
        found.append(seconds_of(device, partial(compute, *given)) if on_cpu else queued_seconds(compute, given, device))
    read = sum(part.nbytes for part in given if isinstance(part, Tensor))
    return {"microseconds": 1e6 * found[0], "torch": 1e6 * found[1], "gigabytes_per_second": read / found[0] / 1e9}

"""Compiles the GPU kernels for an architecture without a GPU: ``python -m tests.kernels.ahead_of_time 90 [kernels.json]``.

With a file, the kernels are those that Inductor wrote, a list of names with code. Prints a line of JSON for each kernel and
shape: what the assembler and the kernel's code say. Triton keeps its target per process, so each architecture needs one.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from layerskip.kernels import decode_attention, few_rows_linear

_META = torch.device("meta")
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_COUNTS = {"matrix": r"\b(?:mma\.sync|wgmma|tcgen05\.mma)", "asynchronous": r"cp\.async\.(?:cg|ca)\.|cp\.async\.bulk"}

ATTENTION = {  # heads, key heads, queries, head size, keys
    "SmolLM2, 8 queries": (9, 3, 8, 64, 512),
    "SmolLM2, 24 queries": (9, 3, 24, 64, 2048),
    "8B, 8 queries": (32, 8, 8, 128, 2048),
    "8B, 8 queries of 4096 keys": (32, 8, 8, 128, 4096),
    "8B, 1 query of 8192 keys": (32, 8, 1, 128, 8192),
    "Gemma 3, 8 queries": (4, 1, 8, 256, 2048),
}
PRODUCTS = {  # rows, outputs, inputs, gate, norm, residual
    "SmolLM2, queries, keys and values": (8, 960, 576, "", "llama", False),
    "SmolLM2, gated": (8, 3072, 576, "silu", "llama", False),
    "8B, gated, 16 rows": (16, 28672, 4096, "silu", "llama", False),
    "8B, down, 16 rows": (16, 4096, 14336, "", "", True),
    "8B, gated, 24 rows": (24, 28672, 4096, "silu", "llama", False),
    "8B, down, 24 rows": (24, 4096, 14336, "", "", True),
    "Gemma 3, gated": (8, 13824, 1152, "gelu_tanh", "gemma", False),
    "odd": (5, 100, 200, "", "", False),
}


class _Recorded:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.compiled: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.compiled.append(self._kernel.warmup(*args, grid=grid, **kwargs))


def _set_target(capability: int) -> None:
    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: _META,
        launcher_cls=lambda *args, **kwargs: None,
    )
    driver.set_active(device)


def _resources(kernel: Any, capability: int) -> dict[str, int | str]:
    """Return registers and spilled bytes of a thread, bytes of shared memory, counts of instructions, and a hash."""
    code = kernel.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(code)
        name = f"sm_{capability}{'a' if capability >= 90 else ''}"
        assembler = "ptxas-blackwell" if capability >= 100 else "ptxas"
        command = [str(_TOOLS / assembler), "-v", f"--gpu-name={name}", str(file), "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None
    assert spilled is not None
    counts = {name: len(re.findall(pattern, code)) for name, pattern in _COUNTS.items()}
    return {
        "registers": int(registers[1]),
        "spilled": int(spilled[1]),
        "shared": int(kernel.metadata.shared),
        "hash": kernel.hash,
    } | counts


def _attend(heads: int, shared: int, count: int, width: int, keys: int, dtype: torch.dtype) -> None:
    query = torch.empty(1, count, heads, width, dtype=dtype, device=_META).transpose(1, 2)
    key, value = torch.empty(2, 1, shared, keys, width, dtype=dtype, device=_META)
    mask = torch.empty(1, 1, count, keys, dtype=torch.bool, device=_META)
    decode_attention.attend_on_gpu(query, key, value, mask, width**-0.5)


def _multiply(rows: int, outputs: int, width: int, gate: str, norm: str, residual: bool, dtype: torch.dtype) -> None:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=_META)

    added = empty(1, rows, outputs) if residual else None
    scale = empty(width) if norm else None
    few_rows_linear.multiply_on_gpu(empty(1, rows, width), empty(outputs, width), added, gate, norm, scale, 1e-5)


def _compile_own(capability: int) -> None:
    dtype = torch.bfloat16 if capability >= 80 else torch.float16
    for module, name, run, shapes in (
        (decode_attention, "_attend_split", _attend, ATTENTION),
        (few_rows_linear, "_multiply", _multiply, PRODUCTS),
    ):
        recorded = _Recorded(getattr(module, name))
        setattr(module, name, recorded)
        for shape, sizes in shapes.items():
            run(*sizes, dtype)  # type: ignore[operator]
            print(json.dumps({"kernel": name, "shape": shape} | _resources(recorded.compiled[-1], capability)), flush=True)


def _compile_inductors(sources: list[tuple[str, str]], capability: int) -> None:
    """Compile each kernel in every configuration among which Inductor chooses."""
    compiled: list[Any] = []
    compile_plainly = triton.compile

    def compile_recorded(*args: Any, **kwargs: Any) -> Any:
        compiled.append(compile_plainly(*args, **kwargs))
        return compiled[-1]

    triton_helpers.set_driver_to_gpu = lambda: None
    triton.compile = compile_recorded
    for name, source in sources:
        kernel = getattr(PyCodeCache.load(source), name)
        kernel.device_props = kernel.device_props._replace(cc=capability)
        for index, configuration in enumerate(kernel.configs):
            with contextlib.suppress(AttributeError, RuntimeError):  # after compiling, of what needs a GPU
                kernel._precompile_config(configuration)
            resources = _resources(compiled.pop(), capability)
            print(json.dumps({"kernel": name, "shape": str(index)} | resources), flush=True)


def main(capability: int, sources: str | None = None) -> None:
    """Compile all kernels for a compute capability."""
    _set_target(capability)
    if sources is None:
        _compile_own(capability)
    else:
        _compile_inductors(json.loads(Path(sources).read_text()), capability)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])

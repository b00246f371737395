"""The GPU kernels compile for the usual architectures, and fit them, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from layerskip.device.trial import HAS_TRITON
from tests.accelerator import DEVICE
from tests.exhaustive import representative
from tests.models.compilers import compile_for_gpu
from tests.models.published import layer_of, run_compiled

_SHARED_KILOBYTES = {80: 163, 89: 99, 90: 227, 100: 227}
"""Shared memory of a block by compute capability, CUDA C++ Programming Guide, "Technical Specifications"."""
CAPABILITIES = representative((80, 89, 90), (100,))


pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not HAS_TRITON or DEVICE != "cpu", reason="needs Triton, stands in for a GPU"),
]


def _compiled(capability: int, *sources: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.ahead_of_time", str(capability), *map(str, sources)]
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_spill_no_register_and_multiply_by_matrix_instructions(capability: int) -> None:
    kernels = _compiled(capability)
    assert {kernel["kernel"] for kernel in kernels} == {"_attend_split", "_multiply"}
    for kernel in kernels:
        assert kernel["spilled"] == 0, kernel
        assert kernel["shared"] <= _SHARED_KILOBYTES[capability] * 1024, kernel
        assert kernel["matrix"] > 0, kernel
    hashes = {kernel["shape"]: kernel["hash"] for kernel in kernels}
    assert hashes["8B, 8 queries"] == hashes["8B, 8 queries of 4096 keys"]  # a longer cache compiles nothing


@pytest.fixture(scope="module")
def inductors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels that Inductor writes for layers of published models, for passes over a chain and over one token."""
    kernels: list[tuple[str, str]] = []
    with pytest.MonkeyPatch.context() as patched:
        for shape in ("SmolLM2 135M", "Llama 3.1 8B", "Qwen3 0.6B", "Gemma 3 4B"):
            model = layer_of(shape)
            compile_for_gpu(patched, kernels)
            for width in (8, 1):
                run_compiled(model, width)
            patched.undo()
    file = tmp_path_factory.mktemp("inductor") / "kernels.json"
    file.write_text(json.dumps(kernels))
    return file


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_inductors_kernels_spill_no_register(capability: int, inductors: Path) -> None:
    """In one of the configurations among which Inductor chooses by their time."""
    spilled: dict[str, list[int]] = {}
    for kernel in _compiled(capability, inductors):
        spilled.setdefault(kernel["kernel"], []).append(kernel["spilled"])
        assert kernel["shared"] <= _SHARED_KILOBYTES[capability] * 1024, kernel
    assert len(spilled) > 8
    assert not any(map(min, spilled.values())), spilled

"""The GPU kernels compile for the usual architectures, and fit them, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from layerskip.device.trial import HAS_TRITON
from tests.accelerator import DEVICE
from tests.exhaustive import representative

_SHARED_KILOBYTES = {80: 163, 89: 99, 90: 227, 100: 227}
"""Shared memory of a block by compute capability, CUDA C++ Programming Guide, "Technical Specifications"."""
CAPABILITIES = representative((80, 89, 90), (100,))


pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not HAS_TRITON or DEVICE != "cpu", reason="needs Triton, stands in for a GPU"),
]


def _compiled(capability: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.ahead_of_time", str(capability)]
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

"""The environment of a measurement: processor or GPU, threads and versions, for exports, logs and records."""

from __future__ import annotations

import contextlib
import functools
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from layerskip.models.compiled_layers import compiled_layers
from layerskip.models.packing import uses_packing
from layerskip.models.target import Target

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("torch", "transformers", "optuna", "mlflow", "hydra-core")


def environment(target: Target) -> dict[str, Any]:
    """Return the environment as plain values: those of :func:`machine`, ``platform`` and ``git_commit``."""
    return machine(target) | {"platform": platform.platform(), "git_commit": _own_commit()}


def machine(target: Target) -> dict[str, Any]:
    """Return the values that times depend on, with the instruction set of a CPU as far as torch may use it."""
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    used = sorted({str(place) for place in vars(target.model).get("hf_device_map", {}).values()})
    described = {
        "device": device.type,
        "device_name": name if len(used) < 2 else f"{name} ({', '.join(used)})",  # where the weights are, if split
        "threads": torch.get_num_threads(),
        "packed_weights": uses_packing(target.model),
        "versions": dict(_versions()),
    }
    if compiled_layers(target.model) is not None:
        described["compiled_layers"] = True
    if device.type == "cpu":
        described["instruction_set"] = torch.backends.cpu.get_cpu_capability()
    return described


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


@functools.cache
def _own_commit() -> str | None:
    """Return the commit of this program, as it was when the process first asked."""
    return git_commit(_ROOT)


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def git_commit(root: Path) -> str | None:
    """Return the commit of this program's checkout, with ``-dirty`` if its code was changed; None outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # A program installed inside another project's checkout does not belong to that project's commits.
        git("ls-files", "--error-unmatch", str(Path(__file__).relative_to(_ROOT)))
        commit, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", "layerskip", "searches", "conf")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit

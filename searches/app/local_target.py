"""Targets from the local disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from layerskip import Target, TargetError, load_target


def load_local(
    path: str,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    pack_weights: bool | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    quantization: Any = None,
    compile: str = "auto",
) -> Target:
    """Load a target as :func:`layerskip.load_target` does, from a folder or a ``.gguf`` file, never from the hub.

    Args:
        path: of the folder or the file.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto``.
        device: ``cpu``, ``cuda``, another device of torch, or ``auto``.
        trust_remote_code: whether code in the folder may run.
        pack_weights: whether weights are packed for the CPU; None decides by the machine.
        device_map: places the weights on several devices; None for ``device``.
        quantization: how to quantise the weights; None keeps them as they are stored.
        compile: whether decoder layers are compiled: ``auto`` (on CUDA), ``on`` or ``off``.
    """
    if not os.path.exists(path):
        raise TargetError(f"target.path: there is no folder or file {path}")
    return load_target(path, None, dtype, device, trust_remote_code, pack_weights, device_map, quantization, compile)

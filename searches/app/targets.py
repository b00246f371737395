"""The target of a program: from the local disk, or the one that an export on the command line names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from layerskip import Export, Target, TargetError, load_target
from layerskip.models.target import described_precision
from searches.app.composition import literal

_OVERRIDE = re.compile(r"-|~\w|\+{0,2}[A-Za-z]\w*([./@]\w+)*=")  # or an option, such as --cfg


def load_local(
    path: str,
    dtype: str = "auto",
    device: str | Mapping[str, Any] = "auto",
    trust_remote_code: bool = False,
    pack_weights: bool | None = None,
    quantization: Any = None,
    compile: str = "auto",
) -> Target:
    """Load a target as :func:`layerskip.load_target` does, from a folder or a ``.gguf`` file, never from the hub."""
    if not os.path.exists(path):
        raise TargetError(f"target.path: there is no folder or file {path}")
    return load_target(path, None, dtype, device, trust_remote_code, pack_weights, quantization, compile)


def load_exported_target(fields: DictConfig, export: Export) -> Target:
    """Return the model that the part ``target`` names, or else that of the export, in the export's data type by default."""
    if fields.dtype is None:
        fields.dtype = described_precision(export.target)
    if "_target_" in fields:
        target: Target = instantiate(fields)
        return target
    return load_target(
        export.target["name"],
        revision=export.target.get("revision"),
        dtype=fields.dtype,
        device=fields.device,
        trust_remote_code=fields.trust_remote_code,
        compile=fields.get("compile", "auto"),  # an export of commands decodes nothing
        quantization=export.target.get("quantization"),
    )


def command_line(arguments: Sequence[str], field: str = "export") -> list[str]:
    """Return command-line arguments for Hydra; a leading path or address becomes the override of a field."""
    if arguments and (os.path.isfile(arguments[0]) or not _OVERRIDE.match(arguments[0])):
        return [f"{field}={literal(arguments[0])}", *arguments[1:]]
    return list(arguments)

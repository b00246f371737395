"""An export as the input of a program: its path on the command line, and the model that it is for."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from hydra.utils import instantiate
from omegaconf import DictConfig

from layerskip import Export, Target, load_target
from searches.app.composition import literal

_OVERRIDE = re.compile(r"-|~\w|\+{0,2}[A-Za-z]\w*([./@]\w+)*=")  # or an option, such as --cfg


def load_exported_target(fields: DictConfig, export: Export) -> Target:
    """Return the configured model, or else the model that the export names.

    Args:
        fields: the part ``target`` of a configuration, in which a model is optional.
        export: the export; its data type is the default.
    """
    if fields.dtype is None:
        fields.dtype = export.target["dtype"]
    if "_target_" in fields:
        target: Target = instantiate(fields)
        return target
    return load_target(
        export.target["name"],
        revision=export.target.get("revision"),
        dtype=fields.dtype,
        device=fields.device,
        trust_remote_code=fields.trust_remote_code,
        device_map=fields.device_map,
        compile=fields.get("compile", "auto"),  # an export of commands decodes nothing
        quantization=export.target.get("quantization"),
    )


def command_line(arguments: Sequence[str]) -> list[str]:
    """Return command-line arguments for Hydra; a leading path becomes the override ``export=``."""
    if not arguments or not (os.path.isfile(arguments[0]) or not _OVERRIDE.match(arguments[0])):
        return list(arguments)
    return [f"export={literal(arguments[0])}", *arguments[1:]]

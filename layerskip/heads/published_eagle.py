"""EAGLE-1 heads in their authors' layout: a Llama configuration of one layer, and weights under their own names.

Such a folder does not name the model whose hidden states its head reads, but most hold a copy of its embeddings.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from layerskip.config import ConfigError
from layerskip.models.target import Target
from layerskip.models.trained_module import same_weights

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
EMBEDDINGS = "embed_tokens.weight"
_PICKLE = "pytorch_model.bin"
_COMPARED = 1024  # rows of the embeddings
_EAGLE_3 = ("d2t", "t2d", "midlayer.")  # how names of its weights begin


def is_published(folder: Path) -> bool:
    """Return whether a folder has a head in its authors' layout, which engines load as well."""
    return (folder / CONFIG).is_file() and any((folder / name).is_file() for name in (WEIGHTS, _PICKLE))


def eagle_method(folder: Path) -> str:
    """Return ``eagle`` or, for published heads whose configuration names EAGLE-3, ``eagle3``: the engines' method."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        names = f"{config.get('architectures')} {config.get('speculators_model_type')}"
    except (OSError, ValueError, AttributeError):  # it is no table
        return "eagle"
    return "eagle3" if "eagle3" in names.lower() else "eagle"


def read_published(folder: Path, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the fields of a head's shape, and its weights under this project's names.

    Raises:
        ConfigError: the head cannot be read, is damaged, or was made for another target.
    """
    try:
        config, weights = json.loads((folder / CONFIG).read_text(encoding="utf-8")), _read_weights(folder)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"head: cannot read {folder}: {' '.join(str(error).split())}") from error
    if eagle_method(folder) == "eagle3" or any(name.startswith(_EAGLE_3) for name in weights):
        raise ConfigError(f"head: {folder} has the layout of EAGLE-3's authors, which is not supported; EAGLE-1's is")
    embeddings = weights.pop(EMBEDDINGS, None)
    try:
        fields = {
            "hidden": config["hidden_size"],
            "intermediate": config["intermediate_size"],
            "heads": config["num_attention_heads"],
            "key_value_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
            "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            "rope_theta": _rope_theta(config),
            "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
            "bias": "fc.bias" in weights,
            "attention_bias": "layers.0.self_attn.q_proj.bias" in weights,
        }
    except (LookupError, TypeError, ArithmeticError, AttributeError) as error:
        raise ConfigError(f"head: {folder} is damaged: {CONFIG} does not give its shape: {error}") from error
    if embeddings is not None and not _are_embeddings_of(target, embeddings):
        raise ConfigError(f"head: {folder} was made for another target: its embeddings are not those of {target.name}")
    return fields, {name if name.startswith("fc.") else f"body.{name}": tensor for name, tensor in weights.items()}


def _rope_theta(config: Mapping[str, Any]) -> Any:
    """Return the base of the rotary positions. Refuse scaled ones, with which the head would silently draft badly."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"head: its positions are scaled by {kind!r}, which is not supported")
    return given.get("rope_theta") or config.get("rope_theta") or 10_000.0


def _are_embeddings_of(target: Target, embeddings: Tensor) -> bool:
    """Return whether embeddings equal the target's up to rounding, in a sample of rows.

    Fine-tuning moves large and small values by similar amounts, and therefore small ones further than rounding does.
    """
    own: Tensor = target.model.get_input_embeddings().weight  # type: ignore[assignment]
    rows = slice(None, None, max(1, len(own) // _COMPARED))
    return same_weights(*(table[rows].detach().float().cpu().numpy() for table in (embeddings, own)))


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Load the weights. A pickle of anything but tensors is refused with ``ValueError``, since it could run code."""
    if (folder / WEIGHTS).is_file():
        return load_file(folder / WEIGHTS)
    try:
        weights = torch.load(folder / _PICKLE, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError):
        weights = None
    if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise ValueError(f"{_PICKLE} does not hold tensors alone")
    return weights

"""EAGLE heads as their authors publish them: a Llama configuration of one layer, and weights under their own names.

Their files do not name the model whose hidden states a head reads, but hold a copy of its embeddings in half precision.
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

_CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_EMBEDDINGS = "embed_tokens.weight"
_COMPARED = 1024  # rows of the embeddings
_EAGLE_3 = ("d2t", "t2d")  # the maps between EAGLE-3's vocabularies
_BIAS = "layers.0.self_attn.q_proj.bias"  # in heads for Qwen2


def is_published(folder: Path) -> bool:
    """Return whether a folder has a head in its authors' layout."""
    return (folder / _CONFIG).is_file() and any((folder / name).is_file() for name in _WEIGHTS)


def is_eagle_3(folder: Path) -> bool:
    """Return whether a published head's configuration names EAGLE-3, whose heads other engines load."""
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    named = config if isinstance(config, dict) else {}
    return "eagle3" in f"{named.get('architectures')} {named.get('speculators_model_type')}".lower()


def read_published(folder: Path, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the fields of a head's shape, except its modules, and its weights under this project's names.

    Raises:
        ConfigError: the head cannot be read, is damaged, or was made for another target.
    """
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        safe = folder / _WEIGHTS[0]
        weights = load_file(safe) if safe.is_file() else _read_pickled(folder / _WEIGHTS[1])
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"head: cannot read {folder}: {' '.join(str(error).split())}") from error
    if is_eagle_3(folder) or any(name in _EAGLE_3 or name.startswith("midlayer.") for name in weights):
        raise ConfigError(f"head: {folder} has the layout of EAGLE-3's authors, which is not supported; EAGLE-1's is")
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        fields = {
            "hidden": hidden,
            "intermediate": int(config["intermediate_size"]),
            "heads": heads,
            "key_value_heads": int(config.get("num_key_value_heads") or heads),
            "head_dim": int(config.get("head_dim") or hidden // max(1, heads)),
            "bias": "fc.bias" in weights,
            "attention_bias": _BIAS in weights,
            "rope_theta": _rope_theta(config),
            "rms_norm_eps": float(config.get("rms_norm_eps") or 1e-5),
        }
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ConfigError(f"head: {folder} is damaged: {_CONFIG} does not give its shape: {error}") from error
    embeddings = weights.pop(_EMBEDDINGS, None)
    if embeddings is not None and hidden == target.hidden:
        _check_embeddings(embeddings, target, f"head: {folder} was made for another target: its")
    return fields, {name if name.startswith("fc.") else f"body.{name}": tensor for name, tensor in weights.items()}


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Return the base of the rotary positions. Refuse scaled ones, with which the head would silently draft badly."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"head: its positions are scaled by {kind!r}, which is not supported")
    return float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0)


def _check_embeddings(embeddings: Tensor, target: Target, prefix: str) -> None:
    """Check that embeddings equal the target's up to rounding.

    Fine-tuning moves large and small values by similar amounts, and therefore small ones further than rounding does.
    """
    if embeddings.shape[:1] != (target.vocabulary,):
        raise ConfigError(f"{prefix} vocabulary is not that of {target.name}")
    own: Tensor = target.model.get_input_embeddings().weight  # type: ignore[assignment]
    rows = slice(0, min(len(own), len(embeddings)), max(1, target.vocabulary // _COMPARED))
    if not same_weights(*(table[rows].detach().float().cpu().numpy() for table in (embeddings, own))):
        raise ConfigError(f"{prefix} embeddings are not those of {target.name}")


def _read_pickled(file: Path) -> dict[str, Tensor]:
    """Load a pickle of tensors. A pickle of anything else is refused, since it could run code."""
    try:
        weights = dict(torch.load(file, weights_only=True, map_location="cpu"))
        if all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in weights.items()):
            return weights
    except (pickle.UnpicklingError, RuntimeError, EOFError, TypeError, ValueError) as error:
        raise ValueError(f"{file.name} does not hold tensors alone") from error
    raise ValueError(f"{file.name} does not hold tensors alone")

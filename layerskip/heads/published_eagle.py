"""How do EAGLE's authors lay out a head? A Llama configuration of one layer, and weights under their own code's names.

Their files do not say whose hidden states a head reads, but hold a copy of that model's embeddings, in half precision.
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
_LATER = ("d2t", "t2d")  # the maps between EAGLE-3's vocabularies
_BIAS = "layers.0.self_attn.q_proj.bias"  # that of a head for Qwen2


def is_published(folder: Path) -> bool:
    """Whether a head lies there as its authors lay it out."""
    return (folder / _CONFIG).is_file() and any((folder / name).is_file() for name in _WEIGHTS)


def read_published(folder: Path, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a head is made from, but for what it reads, and its weights under our names.

    Args:
        folder: with a head of EAGLE-1.
        target: that it must be for; its embeddings tell it even from models that were tuned from the same one.

    Raises:
        ConfigError: it cannot be read, is damaged, or was made for another target.
    """
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        safe = folder / _WEIGHTS[0]
        weights = load_file(safe) if safe.is_file() else _read_pickled(folder / _WEIGHTS[1])
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"head: cannot read {folder}: {' '.join(str(error).split())}") from error
    if any(name in _LATER or name.startswith("midlayer.") for name in weights):
        raise ConfigError(f"head: {folder} is laid out as EAGLE-3's authors do, which is not read; EAGLE-1's layout is")
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
        raise ConfigError(f"head: {folder} is damaged: {_CONFIG} does not say what it is made from: {error}") from error
    embeddings = weights.pop(_EMBEDDINGS, None)
    if embeddings is not None and hidden == target.hidden:
        _check_embeddings(embeddings, target, f"head: {folder} was made for another target: its")
    return fields, {name if name.startswith("fc.") else f"body.{name}": tensor for name, tensor in weights.items()}


def _rope_theta(config: Mapping[str, Any]) -> float:
    """The base of its positions; other ways to stretch them are refused, as the head would draft badly without a word."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"head: its positions are scaled by {kind!r}, which is not read")
    return float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0)


def _check_embeddings(embeddings: Tensor, target: Target, other: str) -> None:
    """Fine-tuning moves large and small numbers alike, and so the small ones further than rounding would."""
    if embeddings.shape[:1] != (target.vocabulary,):
        raise ConfigError(f"{other} vocabulary is not that of {target.name}")
    own: Tensor = target.model.get_input_embeddings().weight  # type: ignore[assignment]
    rows = slice(0, min(len(own), len(embeddings)), max(1, target.vocabulary // _COMPARED))
    if not same_weights(*(table[rows].detach().float().cpu().numpy() for table in (embeddings, own))):
        raise ConfigError(f"{other} embeddings are not those of {target.name}")


def _read_pickled(file: Path) -> dict[str, Tensor]:
    """Tensors and nothing else: a pickle that would run code is refused."""
    try:
        found = dict(torch.load(file, weights_only=True, map_location="cpu"))
        if all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in found.items()):
            return found
    except (pickle.UnpicklingError, RuntimeError, EOFError, TypeError, ValueError) as error:
        raise ValueError(f"{file.name} does not hold tensors alone") from error
    raise ValueError(f"{file.name} does not hold tensors alone")

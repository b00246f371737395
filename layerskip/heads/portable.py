"""Trained heads in the layouts that inference engines load: EAGLE-1's of its authors, and Medusa's of vLLM.

vLLM's EAGLE-1 layer takes embeddings of its own, SGLang's those of the target. Both read the draft with the target's output
layer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from layerskip.config import ConfigError
from layerskip.files import atomic_write, write_json
from layerskip.heads.eagle import KIND as EAGLE
from layerskip.heads.eagle import RMS_NORM_EPS, EagleShape
from layerskip.heads.medusa import KIND as MEDUSA
from layerskip.heads.medusa import MedusaShape
from layerskip.models.target import Target
from layerskip.models.trained_module import load_trained, read_metadata

ENGINES = ("vllm", "sglang")
_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"


def is_published(folder: Path) -> bool:
    """Return whether a folder has a head in its authors' layout, which engines load, and this library does not."""
    return (folder / _CONFIG).is_file() and any((folder / name).is_file() for name in (_WEIGHTS, "pytorch_model.bin"))


def why_not_portable(folder: Path) -> str | None:
    """Return why no layout of an engine can hold a head; None if one can, or if the head is published already."""
    if is_published(folder):
        return None
    try:
        shape = read_metadata(folder)["shape"]
    except ConfigError as error:
        return str(error).removeprefix("head: ")
    if shape.get("lookback"):
        return "its attention looks back at earlier embeddings, for which engines have no layout; train with lookback=0"
    return None


def eagle_method(folder: Path) -> str:
    """Return ``eagle`` or, for published heads whose configuration names EAGLE-3, ``eagle3``: the engines' method."""
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "eagle"
    named = config if isinstance(config, dict) else {}
    return "eagle3" if "eagle3" in f"{named.get('architectures')} {named.get('speculators_model_type')}".lower() else "eagle"


def count_medusa_heads(folder: Path) -> int:
    """Return the number of Medusa heads in a folder of either layout; raise :class:`ConfigError` if it does not say."""
    try:
        if is_published(folder):
            described = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
            return int(described.get("num_heads") or described["medusa_num_heads"])
        return int(read_metadata(folder)["shape"]["heads"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"head: {folder} does not state its number of heads") from None


def save_portable(source: Path, folder: Path, target: Target, engine: str = "vllm") -> Path:
    """Save a head as an engine loads it: ``config.json`` and ``model.safetensors``; return the folder.

    Args:
        engine: ``vllm`` or ``sglang``; Medusa's heads are for vLLM.

    Raises:
        ConfigError: the engine has no layout for this head, it is damaged, or it belongs to another target.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine: {engine} loads no heads; {' and '.join(ENGINES)} do")
    reason = why_not_portable(source)
    if reason is None and is_published(source):
        reason = f"{source} has its authors' layout already, which engines load"
    if reason is not None:
        raise ConfigError(f"head: {reason}")
    kind = str(read_metadata(source).get("kind"))
    fields, weights = load_trained(source, kind, target)
    tokens = weights.pop("tokens", None)
    if kind == EAGLE:
        config, tensors = _eagle(EagleShape(**fields), weights, target, engine)
    elif kind == MEDUSA and engine == "vllm":
        config, tensors = _medusa(MedusaShape(**fields), weights, tokens, target)
    else:
        raise ConfigError(f"head: {engine} loads no heads of {kind}")
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_write(folder / _CONFIG) as partial_config, atomic_write(folder / _WEIGHTS) as partial:
        write_json(partial_config, config)
        save_file(stored, partial, metadata={"format": "pt"})
    return folder


def _eagle(
    shape: EagleShape, weights: dict[str, Tensor], target: Target, engine: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return configuration and tensors of an EAGLE-1 head, which is a Llama model of one layer."""
    embeddings: Any = target.model.get_input_embeddings()
    vocabulary = int(embeddings.weight.shape[0])
    tensors = {name.removeprefix("body."): tensor for name, tensor in weights.items()}
    if engine == "sglang":  # its linear map has a bias
        tensors["fc.bias"] = torch.zeros(shape.hidden)
    else:
        with torch.inference_mode():  # as the target computes them, which some families scale
            tensors["embed_tokens.weight"] = embeddings(torch.arange(vocabulary, device=target.device)).clone()
    positions = target.model.config.get_text_config(decoder=True)
    config = {
        # vLLM puts Eagle before the name of a model's architecture, SGLang after it.
        "architectures": ["LlamaForCausalLMEagle" if engine == "sglang" else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "qkv_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
        "max_position_embeddings": int(getattr(positions, "max_position_embeddings", 2**20)),
        "dtype": target.dtype,
    }
    return config, tensors


def _medusa(
    shape: MedusaShape, weights: dict[str, Tensor], tokens: Tensor | None, target: Target
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return configuration and tensors of Medusa heads, with the rows of the target's output layer that they share."""
    layer: Any = target.model.get_output_embeddings()
    if not isinstance(layer, nn.Linear) or getattr(layer, "bias", None) is not None:
        raise ConfigError(
            f"head: vLLM loads it only for a linear output layer without bias; that of {target.architecture} is not"
        )
    rows = layer.weight.detach().cpu()
    tensors = {
        f"blocks.{index}.layers.0.{part}": weights[f"blocks.{index}.{part}"]
        for index in range(shape.heads)
        for part in ("weight", "bias")
    }
    if tokens is not None:
        rows = rows[tokens]
        tensors["token_map"] = tokens
    tensors["lm_head.weight"] = rows
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden,
        "num_heads": shape.heads,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "vocab_size": layer.out_features,
        "truncated_vocab_size": len(rows),
        "dtype": target.dtype,
    }
    return config, tensors

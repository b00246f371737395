"""Folders of EAGLE heads, which are in this project's layout or in that of EAGLE-1's authors, which engines load.

The latter has a Llama configuration of one layer. It does not name the model whose hidden states its head reads, but most
hold a copy of its embeddings. vLLM's EAGLE-1 layer takes embeddings of its own, SGLang's those of the target. Both read the
draft with the target's output layer.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from layerskip.config import ConfigError
from layerskip.files import atomic_write, write_json
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.models.compiled_layers import compile_mode, set_compiling
from layerskip.models.packing import pack_like
from layerskip.models.target import Target
from layerskip.models.trained_module import load_trained, read_metadata, restore_weights, same_weights

ENGINES = ("vllm", "sglang")
_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_EMBEDDINGS = "embed_tokens.weight"
_PICKLE = "pytorch_model.bin"
_COMPARED = 1024  # rows of the embeddings
_EAGLE_3 = ("d2t", "t2d", "midlayer.")  # how names of its weights begin


def is_published(folder: Path) -> bool:
    """Return whether a folder has a head in its authors' layout, which engines load as well."""
    return (folder / _CONFIG).is_file() and any((folder / name).is_file() for name in (_WEIGHTS, _PICKLE))


def eagle_method(folder: Path) -> str:
    """Return ``eagle`` or, for published heads whose configuration names EAGLE-3, ``eagle3``: the engines' method."""
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        names = f"{config.get('architectures')} {config.get('speculators_model_type')}"
    except (OSError, ValueError, AttributeError):  # it is no table
        return "eagle"
    return "eagle3" if "eagle3" in names.lower() else "eagle"


def read_eagle(folder: Path, target: Target) -> tuple[EagleShape, dict[str, Tensor]]:
    """Read the shape and the weights of a head, also in its authors' layout.

    A head that is damaged or was made for another target is refused with a :class:`ConfigError`.
    """
    fields, weights = _read_published(folder, target) if is_published(folder) else load_trained(folder, target)
    try:
        shape = EagleShape(**fields)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"head: {folder} is damaged: its shape: {error}") from error
    if shape.hidden != target.hidden:
        raise ConfigError(f"head: {folder} was made for another target: it reads {shape.hidden} elements per token")
    return shape, weights


def load_eagle(folder: str | Path, target: Target) -> EagleHead:
    """Load a head in the target's dtype and on its device; errors are those of :func:`read_eagle`."""
    shape, weights = read_eagle(Path(folder), target)
    head = EagleHead(shape, weights.pop("tokens", None))
    restore_weights(head, weights, f"head: {folder} is damaged:", ("tokens", "body.embed_tokens.weight"))
    rotary: Any = head.body.rotary_emb
    frequencies = rotary.inv_freq.clone()
    head = head.to(target.device, target.model.dtype).eval()
    rotary.inv_freq = frequencies.to(target.device)  # positions rotate in float32, as in training
    set_compiling(head.body, compile_mode(target.model))
    return pack_like(target.model, head)


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


def save_portable(source: Path, folder: Path, target: Target, engine: str = "vllm") -> Path:
    """Save a head as an engine of :data:`ENGINES` loads it: ``config.json`` and ``model.safetensors``; return the folder.

    Raises:
        ConfigError: the engine has no layout for this head, it is damaged, or it belongs to another target.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine: {engine} loads no heads; {' and '.join(ENGINES)} do")
    if is_published(source):
        raise ConfigError(f"head: {source} has its authors' layout already, which engines load")
    if (reason := why_not_portable(source)) is not None:
        raise ConfigError(f"head: {reason}")
    shape, weights = read_eagle(source, target)
    tensors = {name.removeprefix("body."): tensor for name, tensor in weights.items() if name != "tokens"}
    embeddings: Any = target.model.get_input_embeddings()
    vocabulary = int(embeddings.weight.shape[0])
    if engine == "sglang":
        architecture = "LlamaForCausalLMEagle"
        tensors["fc.bias"] = torch.zeros(shape.hidden)  # its linear map has a bias
    else:
        architecture = "LlamaForCausalLM"  # vLLM puts Eagle before the name itself
        with torch.inference_mode():  # as the target computes them, which some families scale
            tensors[_EMBEDDINGS] = embeddings(torch.arange(vocabulary, device=target.device)).clone()
    config = shape.to_llama() | {"architectures": [architecture], "model_type": "llama", "rope_theta": shape.rope_theta}
    config |= {"qkv_bias": False, "tie_word_embeddings": False, "vocab_size": vocabulary, "dtype": target.dtype}
    own = target.model.config.get_text_config(decoder=True)
    config["max_position_embeddings"] = int(getattr(own, "max_position_embeddings", 2**20))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_write(folder / _CONFIG) as partial_config, atomic_write(folder / _WEIGHTS) as partial:
        write_json(partial_config, config)
        save_file(tensors, partial, metadata={"format": "pt"})
    return folder


def _read_published(folder: Path, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the fields of a published head's shape, and its weights under this project's names."""
    try:
        config, weights = json.loads((folder / _CONFIG).read_text(encoding="utf-8")), _read_weights(folder)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"head: cannot read {folder}: {' '.join(str(error).split())}") from error
    if eagle_method(folder) == "eagle3" or any(name.startswith(_EAGLE_3) for name in weights):
        raise ConfigError(f"head: {folder} has the layout of EAGLE-3's authors, which is not supported; EAGLE-1's is")
    embeddings = weights.pop(_EMBEDDINGS, None)
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
        raise ConfigError(f"head: {folder} is damaged: {_CONFIG} does not give its shape: {error}") from error
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
    if (folder / _WEIGHTS).is_file():
        return load_file(folder / _WEIGHTS)
    try:
        weights = torch.load(folder / _PICKLE, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError):
        weights = None
    if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise ValueError(f"{_PICKLE} does not hold tensors alone")
    return weights

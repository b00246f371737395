"""Trained heads in the layouts that inference engines load: EAGLE-1's, as its authors publish it, and Medusa's of vLLM.

vLLM's EAGLE layer has no bias where it joins embedding and state, but takes embeddings of its own. The bias becomes part of
these: with ``W e`` the embedding's share and ``b`` the bias, ``W (e + d) = W e + b`` for the solution of ``W d = b``. SGLang
has the bias and takes the target's embeddings. Both read the draft with the target's output layer.
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
from layerskip.heads.eagle import EagleShape
from layerskip.heads.medusa import KIND as MEDUSA
from layerskip.heads.medusa import MedusaShape
from layerskip.heads.published_eagle import is_published
from layerskip.models.target import Target
from layerskip.models.trained_module import load_trained, read_metadata

ENGINES = ("vllm", "sglang")
_TOLERANCE = 2e-2  # of the bias, after rounding to the target's dtype


def why_not_portable(folder: Path) -> str | None:
    """Return why no engine's layout can hold a head; None if one can, or if the head is published already."""
    if is_published(folder):
        return None
    try:
        metadata = read_metadata(folder, "head")
    except ConfigError as error:
        return str(error).removeprefix("head: ")
    shape = metadata["shape"]
    if shape.get("lookback"):
        return "its attention looks back at earlier embeddings, for which engines have no layout; train with lookback=0"
    if len(shape.get("modules", ())) > 1:
        return "it reads three layers, but joins embedding and state before its layer; EAGLE-3's layout does it inside"
    return None


def count_medusa_heads(folder: Path) -> int:
    """Return the number of Medusa heads in a folder, of this project's layout or of their authors'.

    Raises:
        ConfigError: it does not say.
    """
    try:
        if is_published(folder):
            described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            return int(described.get("num_heads") or described["medusa_num_heads"])
        return int(read_metadata(folder, "head")["shape"]["heads"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"head: {folder} does not state its number of heads") from None


def save_portable(source: Path, folder: Path, target: Target, engine: str = "vllm") -> Path:
    """Save a head as an engine loads it: ``config.json`` and ``model.safetensors``.

    Args:
        source: the folder of the head.
        folder: written.
        target: the target that the head belongs to.
        engine: ``vllm`` or ``sglang``; Medusa's heads are for vLLM.

    Returns:
        The folder.

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
    kind = str(read_metadata(source, "head").get("kind"))
    fields, weights = load_trained(source, kind, target)
    tokens = weights.pop("tokens", None)
    if kind == EAGLE:
        config, tensors = _eagle(EagleShape.from_dict(fields), weights, target, engine)
    elif kind == MEDUSA and engine == "vllm":
        config, tensors = _medusa(MedusaShape.from_dict(fields), weights, tokens, target)
    else:
        raise ConfigError(f"head: {engine} loads no heads of {kind}")
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_write(folder / "config.json") as partial_config, atomic_write(folder / "model.safetensors") as partial:
        write_json(partial_config, config)
        save_file(stored, partial, metadata={"format": "pt"})
    return folder


def _eagle(
    shape: EagleShape, weights: dict[str, Tensor], target: Target, engine: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return configuration and tensors of an EAGLE-1 head."""
    table = _embedding_table(target)
    tensors = {name.removeprefix("body."): tensor for name, tensor in weights.items()}
    bias = tensors.pop("fc.bias", torch.zeros(shape.hidden))
    if engine == "sglang":
        tensors["fc.bias"] = bias
    else:
        tensors["embed_tokens.weight"] = _with_bias(table, tensors["fc.weight"], bias)
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
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,  # of the output; a head may have one of queries, keys and values
        "qkv_bias": shape.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": table.shape[0],
        "max_position_embeddings": int(getattr(_text_config(target), "max_position_embeddings", 2**20)),
        "dtype": target.dtype,
    }
    return config, tensors


def _embedding_table(target: Target) -> Tensor:
    """Return the embeddings of all tokens, ``[V, H]``, as the target computes them, which some families scale."""
    embeddings: Any = target.model.get_input_embeddings()
    rows = int(embeddings.weight.shape[0])
    with torch.inference_mode():
        table: Tensor = embeddings(torch.arange(rows, device=target.device))
    return table.clone()


def _with_bias(table: Tensor, joined: Tensor, bias: Tensor) -> Tensor:
    """Return embeddings that carry the bias of the linear map that reads them, ``[V, H]`` in the table's dtype.

    Args:
        table: ``[V, H]``: the target's embeddings.
        joined: ``[H, 2 H]``: the linear map of embedding and state.
        bias: ``[H]``.

    Raises:
        ConfigError: rounding to the dtype would change what the head computes.
    """
    share = joined[:, : table.shape[1]].double().cpu()
    wanted = bias.double().cpu()
    shift = torch.linalg.lstsq(share, wanted[:, None], driver="gelsd").solution[:, 0]
    moved: Tensor = (table.float().cpu() + shift.float()).to(table.dtype)
    sample = slice(0, None, max(1, len(table) // 256))
    got, expected = moved[sample].double() @ share.T, table[sample].double().cpu() @ share.T + wanted
    rounding = 0.0 if table.dtype == torch.float32 else _TOLERANCE * float(expected.norm())
    if not float((got - expected).norm()) <= 1e-4 * float(expected.norm()) + rounding:
        raise ConfigError("head: the bias of its linear map cannot become part of the embeddings, and vLLM's has none")
    return moved


def _medusa(
    shape: MedusaShape, weights: dict[str, Tensor], tokens: Tensor | None, target: Target
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return configuration and tensors of Medusa heads, with the rows of the target's output layer that they share."""
    layer: Any = target.model.get_output_embeddings()
    if not isinstance(layer, nn.Linear) or getattr(layer, "bias", None) is not None:
        raise ConfigError(f"head: vLLM's Medusa needs an output layer without bias; {target.architecture} has none")
    size = layer.out_features
    tensors = {
        f"blocks.{index}.layers.0.{part}": weights[f"blocks.{index}.{part}"]
        for index in range(shape.heads)
        for part in ("weight", "bias")
    }
    rows = layer.weight.detach().cpu()
    if tokens is not None:
        tensors["token_map"] = tokens
        rows = rows[tokens]
    tensors["lm_head.weight"] = rows
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden,
        "num_heads": shape.heads,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "vocab_size": size,
        "truncated_vocab_size": size if tokens is None else len(tokens),
        "dtype": target.dtype,
    }
    return config, tensors


def _text_config(target: Target) -> Any:
    return target.model.config.get_text_config(decoder=True)

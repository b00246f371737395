"""Trained heads in the layouts that inference engines load: EAGLE-1's of its authors, and EAGLE-3's and Medusa's of vLLM.

vLLM's EAGLE-1 layer has no bias where it joins embedding and state, but takes embeddings of its own. The bias becomes part
of these: with ``W e`` the embedding's share and ``b`` the bias, ``W (e + d) = W e + b`` for the solution of ``W d = b``.
SGLang has the bias and takes the target's embeddings. Both read the draft with the target's output layer.

EAGLE-3's layout is vLLM's speculators format, as of version 0.32, which has no EAGLE-1. Its output layer is a copy of the
target's. ``norm_output`` states that the head is fed its output after the last norm.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from layerskip.config import ConfigError
from layerskip.files import atomic_write, write_json
from layerskip.heads.eagle import KIND as EAGLE
from layerskip.heads.eagle import EagleShape
from layerskip.heads.medusa import KIND as MEDUSA
from layerskip.heads.medusa import MedusaShape
from layerskip.heads.published_eagle import is_eagle_3, is_published
from layerskip.models.target import Target
from layerskip.models.trained_module import load_trained, read_metadata

ENGINES = ("vllm", "sglang")
_TOLERANCE = 2e-2  # of the bias, after rounding to the target's dtype


def why_not_portable(folder: Path, engine: str = "vllm") -> str | None:
    """Return why no layout of an engine can hold a head; None if one can, or if the head is published already."""
    if is_published(folder):
        return None
    try:
        shape = read_metadata(folder, "head")["shape"]
    except ConfigError as error:
        return str(error).removeprefix("head: ")
    if shape.get("lookback"):
        return "its attention looks back at earlier embeddings, for which engines have no layout; train with lookback=0"
    if shape.get("side_by_side"):
        return None if engine == "vllm" else f"it is fed its output after the last norm; {engine} feeds heads that before it"
    if len(shape.get("modules", ())) > 1:
        return "it reads three layers, but joins embedding and state before its layer, unlike EAGLE-3; train it again"
    return None


def eagle_method(folder: Path) -> str:
    """Return ``eagle`` or ``eagle3``: the engines' method for an EAGLE head that is portable."""
    third = is_eagle_3(folder) if is_published(folder) else read_metadata(folder, "head")["shape"].get("side_by_side")
    return "eagle3" if third else "eagle"


def count_medusa_heads(folder: Path) -> int:
    """Return the number of Medusa heads in a folder of either layout; raise :class:`ConfigError` if it does not say."""
    try:
        if is_published(folder):
            described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            return int(described.get("num_heads") or described["medusa_num_heads"])
        return int(read_metadata(folder, "head")["shape"]["heads"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"head: {folder} does not state its number of heads") from None


def save_portable(source: Path, folder: Path, target: Target, engine: str = "vllm") -> Path:
    """Save a head as an engine loads it: ``config.json`` and ``model.safetensors``; return the folder.

    Args:
        engine: ``vllm`` or ``sglang``; EAGLE-3's and Medusa's heads are for vLLM.

    Raises:
        ConfigError: the engine has no layout for this head, it is damaged, or it belongs to another target.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine: {engine} loads no heads; {' and '.join(ENGINES)} do")
    reason = why_not_portable(source, engine)
    if reason is None and is_published(source):
        reason = f"{source} has its authors' layout already, which engines load"
    if reason is not None:
        raise ConfigError(f"head: {reason}")
    kind = str(read_metadata(source, "head").get("kind"))
    fields, weights = load_trained(source, kind, target)
    tokens = weights.pop("tokens", None)
    if kind == EAGLE and fields.get("side_by_side"):
        config, tensors = _eagle_3(EagleShape.from_dict(fields), weights, tokens, target)
    elif kind == EAGLE:
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
    config = _layer_config(shape, target, table.shape[0]) | {
        # vLLM puts Eagle before the name of a model's architecture, SGLang after it.
        "architectures": ["LlamaForCausalLMEagle" if engine == "sglang" else "LlamaForCausalLM"],
        "qkv_bias": shape.attention_bias,
    }
    return config, tensors


def _eagle_3(
    shape: EagleShape, weights: dict[str, Tensor], tokens: Tensor | None, target: Target
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return configuration and tensors of a head in EAGLE-3's form."""
    rows, size = _output_rows(target, tokens)
    tensors = {name.removeprefix("body."): tensor for name, tensor in weights.items()}
    norm = "layers.0.input_layernorm"  # of embeddings; the attention reads these first
    tensors["fc.weight"] = tensors.pop("fuse.weight")
    tensors["layers.0.hidden_norm.weight"] = tensors.pop(f"{norm}.state_norm.weight")
    tensors[f"{norm}.weight"] = tensors.pop(f"{norm}.embedding_norm.weight")
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = tensors[f"layers.0.self_attn.{name}.weight"]
        tensors[f"layers.0.self_attn.{name}.weight"] = weight.roll(shape.hidden, 1)
    tensors["lm_head.weight"] = rows
    if tokens is not None:
        tensors["d2t"] = tokens - torch.arange(len(tokens))
        tensors["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill(0, tokens, True)
    table, own = _embedding_table(target), cast(Tensor, target.model.get_input_embeddings().weight)
    if not torch.equal(table, own):  # vLLM takes the target's own otherwise
        tensors["embed_tokens.weight"] = table
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": target.name, "architectures": [target.architecture]},
        },
        "draft_vocab_size": len(rows),
        "target_hidden_size": shape.hidden,
        "norm_before_residual": False,
        "norm_output": True,
        # The state before layer i is what comes out of the one before.
        "eagle_aux_hidden_state_layer_ids": [int(name.rpartition(".")[2]) + 1 for name in shape.modules],
        "transformer_layer_config": _layer_config(shape, target, size),
        "dtype": target.dtype,
    }
    return config, tensors


def _layer_config(shape: EagleShape, target: Target, vocabulary: int) -> dict[str, Any]:
    """Return the configuration of a Llama model with an EAGLE head's layer."""
    positions = target.model.config.get_text_config(decoder=True)
    return {
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
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
        "max_position_embeddings": int(getattr(positions, "max_position_embeddings", 2**20)),
        "dtype": target.dtype,
    }


def _embedding_table(target: Target) -> Tensor:
    """Return the embeddings of all tokens, ``[V, H]``, as the target computes them, which some families scale."""
    embeddings: Any = target.model.get_input_embeddings()
    rows = int(embeddings.weight.shape[0])
    with torch.inference_mode():
        table: Tensor = embeddings(torch.arange(rows, device=target.device))
    return table.clone()


def _with_bias(table: Tensor, joined: Tensor, bias: Tensor) -> Tensor:
    """Return the embeddings ``[V, H]`` with the bias ``[H]`` of the linear map ``[H, 2 H]`` that reads them, in their dtype.

    A bias that rounding to the dtype would lose is refused.
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
    rows, size = _output_rows(target, tokens)
    tensors = {
        f"blocks.{index}.layers.0.{part}": weights[f"blocks.{index}.{part}"]
        for index in range(shape.heads)
        for part in ("weight", "bias")
    }
    if tokens is not None:
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
        "vocab_size": size,
        "truncated_vocab_size": len(rows),
        "dtype": target.dtype,
    }
    return config, tensors


def _output_rows(target: Target, tokens: Tensor | None) -> tuple[Tensor, int]:
    """Return the rows of the target's output layer for some tokens, or all, and the number of all."""
    layer: Any = target.model.get_output_embeddings()
    if not isinstance(layer, nn.Linear) or getattr(layer, "bias", None) is not None:
        raise ConfigError(
            f"head: vLLM loads it only for a linear output layer without bias; that of {target.architecture} is not"
        )
    rows = layer.weight.detach().cpu()
    return rows if tokens is None else rows[tokens], layer.out_features

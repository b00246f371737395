"""Trained heads in the layout that inference engines load: that of EAGLE-1's authors.

vLLM's EAGLE-1 layer takes embeddings of its own, SGLang's those of the target. Both read the draft with the target's output
layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from layerskip.config import ConfigError
from layerskip.files import atomic_write, write_json
from layerskip.heads.eagle import read_eagle
from layerskip.heads.published_eagle import CONFIG, EMBEDDINGS, WEIGHTS, is_published
from layerskip.models.target import Target
from layerskip.models.trained_module import read_metadata

ENGINES = ("vllm", "sglang")


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
            tensors[EMBEDDINGS] = embeddings(torch.arange(vocabulary, device=target.device)).clone()
    config = shape.to_llama() | {"architectures": [architecture], "model_type": "llama", "rope_theta": shape.rope_theta}
    config |= {"qkv_bias": False, "tie_word_embeddings": False, "vocab_size": vocabulary, "dtype": target.dtype}
    own = target.model.config.get_text_config(decoder=True)
    config["max_position_embeddings"] = int(getattr(own, "max_position_embeddings", 2**20))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_write(folder / CONFIG) as partial_config, atomic_write(folder / WEIGHTS) as partial:
        write_json(partial_config, config)
        save_file(tensors, partial, metadata={"format": "pt"})
    return folder

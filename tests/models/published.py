"""Layers with the shapes of published models, and compiled passes over them."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache
from layerskip.models.forward import forward
from layerskip.models.packing import set_packing
from layerskip.models.skip_view import decoding_view
from tests.families import config

PROMPT = 12

# Published models: family, width, width of the MLP, heads, heads of keys, width of a head, and the kernels of a layer.
SHAPES = {
    "SmolLM2 135M": ("llama", 576, 1536, 9, 3, 64, 6),
    "Llama 3.2 1B": ("llama", 2048, 8192, 32, 8, 64, 6),
    "Llama 3.2 3B": ("llama", 3072, 8192, 24, 8, 128, 6),
    "Llama 3.1 8B": ("llama", 4096, 14336, 32, 8, 128, 6),
    "Llama 3.1 70B": ("llama", 8192, 28672, 64, 8, 128, 6),
    "Qwen3 0.6B": ("qwen3", 1024, 3072, 16, 8, 128, 6),
    "Qwen3 8B": ("qwen3", 4096, 12288, 32, 8, 128, 6),
    "Qwen3 14B": ("qwen3", 5120, 17408, 40, 8, 128, 6),
    "Gemma 3 4B": ("gemma3_text", 2560, 10240, 8, 4, 256, 8),
    "Gemma 3 27B": ("gemma3_text", 5376, 21504, 32, 16, 128, 8),
}


def layer_of(name: str) -> PreTrainedModel:
    """Return a model of one layer in bfloat16 by a name of ``SHAPES``. Zeros take no memory before they are written."""
    family, hidden, intermediate, heads, key_heads, width, _ = SHAPES[name]
    fields = dict(hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads, head_dim=width)
    fields |= dict(num_key_value_heads=key_heads, num_hidden_layers=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(family, **fields), dtype=torch.bfloat16)
    model._apply(lambda part: torch.zeros(part.shape, dtype=part.dtype))
    set_packing(model, False)  # as on a GPU
    return model.eval()


def run_compiled(model: PreTrainedModel, width: int, positions: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a compiled pass over ``width`` tokens and of the same pass as it is, on caches for positions."""
    view = decoding_view(model)
    tokens = torch.randint(3, 64, (PROMPT + width,), generator=torch.Generator().manual_seed(0))
    found = []
    with torch.inference_mode():
        layers = model.config.num_hidden_layers
        for cache in (acquire_cache(model, layers, positions, torch.device("cpu"), True), KVCache(layers, positions)):
            forward(view, tokens[:PROMPT], cache, last=1)
            cache.length = PROMPT
            found.append(forward(view, tokens[PROMPT:], cache, last=width))
    return found[0], found[1]

"""Passes of tiny models on caches, and decodings with many methods, which several files of tests run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip import SpeculativeConfig, Target, generate
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache
from layerskip.models.forward import forward
from layerskip.models.graph_capture import CapturingCache
from tests.accelerator import DEVICE
from tests.reference import generated

LAYERS = 4
TORCH_DEVICE = torch.device(DEVICE)
PROMPT, LENGTH = [7, 8, 9, 7, 8, 9, 7, 8, 10], 24
METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "prompt_lookup": {"method": "prompt_lookup", "prompt_lookup_min": 1},
    "layer_skip": {"method": "layer_skip", "mask": "attention:1;mlp:2", "num_speculative_tokens": 3},
    "token_recycling": {"method": "token_recycling", "min_token_prob": 0.0},
    "lookahead": {"method": "lookahead", "window": 2, "num_speculative_tokens": 2},
    "cascade": {"method": "cascade", "members": [{"method": "prompt_lookup"}, {"method": "layer_skip", "mask": "layers:1"}]},
}


def tokens_of(count: int, seed: int = 0) -> Tensor:
    """Returns random tokens, the same for every call."""
    return torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@torch.inference_mode()
def fresh(model: nn.Module, tokens: Tensor) -> Tensor:
    """``[n, V]``: the logits of one pass without a cache."""
    return model(input_ids=tokens[None], use_cache=False).logits[0]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 3e-5) -> None:
    """Compares relative to the largest entry."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=float(expected.abs().max()) * tolerance)


def let_token_63_overflow(model: PreTrainedModel) -> None:
    """Changes a tiny Llama so that the values of token 63, and of no other one, are beyond the range of float16."""
    words, values = model.get_input_embeddings().weight, model.model.layers[0].self_attn.v_proj.weight
    words[:, 0], values[:, 0], words[63] = 0.0, 6e4, torch.eye(32, dtype=model.dtype)[0]


def acquired(model: nn.Module, positions: int = 40, holder: object | None = None, layers: int = LAYERS) -> CapturingCache:
    """Takes a capturing cache from the pool."""
    cache = acquire_cache(model, layers, positions, TORCH_DEVICE, static_shapes=True, holder=holder)
    assert isinstance(cache, CapturingCache)
    return cache


def filled(cache: CapturingCache, view: nn.Module, prompt: Tensor, positions: int = 40) -> tuple[CapturingCache, KVCache]:
    """Reads a prompt into a cache and into a plain one, and returns both."""
    plain = KVCache(len(cache.layers), positions, device=DEVICE)
    for held in (cache, plain):
        forward(view, prompt, held, last=1)
        held.length = len(prompt)
    return cache, plain


def greedy(target: Target) -> list[int]:
    """Returns the tokens that transformers' own ``generate`` gives after the prompt."""
    return generated(target.model, PROMPT, LENGTH, eos_token_id=None)


def assert_every_method_gives(expected: list[int], target: Target) -> None:
    """Decodes the prompt with every method; drafts without an idle layer must be accepted."""
    for name, fields in METHODS.items():
        found = generate(target, PROMPT, SpeculativeConfig.from_dict(fields), max_new_tokens=LENGTH)
        assert found.tokens == expected, name
        assert name not in ("layer_skip", "cascade") or found.stats.mean_acceptance_length > 1, name

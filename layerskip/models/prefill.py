"""The pass over a prompt, in parts that bound its memory; and its result, kept for several decodings of the same prompt.

A pass over n tokens needs memory for its mask, n by n with sliding windows, and for all activations.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from layerskip.device.transfer import copy_to_device
from layerskip.models.cache import KVCache
from layerskip.models.forward import Features, forward
from layerskip.models.positions import scaling_depends_on_length
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target

_PART = 1024  # most tokens of a pass; smaller parts read the weights more often, larger ones have larger masks


def parts_of(count: int) -> list[slice]:
    """Split tokens into slices of at most 1024 and nearly equal sizes; a GPU would capture the pass of a small rest."""
    parts = max(1, -(-count // _PART))
    ends = [count * part // parts for part in range(parts + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def run_prefill(model: nn.Module, tokens: Tensor, cache: KVCache, last: int = 1, features: Features | None = None) -> Tensor:
    """Read a prompt: fill the cache after its length, advance the length, and return the logits of the last tokens.

    Tokens are ``[n]`` int64; logits ``[last, V]`` in the model's dtype, ``last`` at most 512 of a long prompt. Features are
    collected for all tokens.
    """
    count = tokens.shape[0]
    # A model that chooses its position scaling by the last position of a pass has another encoding in each part.
    one_pass = isinstance(model, PreTrainedModel) and scaling_depends_on_length(model, cache.length + count)
    parts, collected = [slice(0, count)] if one_pass else parts_of(count), []
    for part in parts:
        logits = forward(model, tokens[part], cache, last if part is parts[-1] else 1, features=features)
        cache.length += part.stop - part.start
        if features is not None:
            collected.append(features.states)
    if features is not None:
        features.states = torch.cat(collected)
    return logits


@dataclass(frozen=True)
class Prefill:
    """A prompt of at least one token after the target's prefill: its keys and values, and the logits ``[1, V]`` after it."""

    tokens: Sequence[int]
    cache: KVCache
    logits: Tensor

    @classmethod
    @torch.inference_mode()
    def of(cls, target: Target, prompt: Sequence[int]) -> Prefill:
        """Run the prefill of a prompt of token ids."""
        cache = KVCache(target.layers, len(prompt), device=target.device)
        logits = run_prefill(decoding_view(target.model), copy_to_device(prompt, target.device), cache)
        return cls(prompt, cache, logits)

    def restore(self, cache: KVCache) -> Tensor:
        """Fill a cache with the prompt, as a prefill would, and return the logits."""
        cache.copy_from([(self.cache, self.cache.length)])
        return self.logits

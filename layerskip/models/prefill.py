"""The keys, values and logits of a prompt, kept for several decodings of the same prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip.device.transfer import copy_to_device
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target


@dataclass(frozen=True)
class Prefill:
    """A prompt after the target's prefill.

    Args:
        cache: the prompt's keys and values.
        logits: ``[1, V]``: the logits after its last token.
    """

    cache: KVCache
    logits: Tensor

    @classmethod
    @torch.inference_mode()
    def of(cls, target: Target, prompt: Sequence[int]) -> Prefill:
        """Run the prefill of a prompt of token ids."""
        cache = KVCache(target.layers, len(prompt), device=target.device)
        logits = forward(decoding_view(target.model), copy_to_device(prompt, target.device), cache, last=1)
        cache.length = len(prompt)
        return cls(cache, logits)

    def restore(self, cache: KVCache) -> Tensor:
        """Fill a cache with the prompt, as a prefill would, and return the logits."""
        cache.copy_from([(self.cache, self.cache.length)])
        return self.logits

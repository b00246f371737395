"""The target's states of one text, and a cache of them. A scan reads every continuation once and drafts from its states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from layerskip.models.cache import KVCache
from layerskip.texts.continuations import Continuation


class TopTokens(NamedTuple):
    """The most likely next tokens by the target, most likely first: ``[N, k]`` float32 and ``[N, k]`` int32."""

    probs: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class TextStates:
    """The target's states of a continuation and its prompt.

    Args:
        tokens: ``[n]`` int64: prompt, continuation, and padding up to the requested length.
        cache: the target's keys and values of these tokens.
        visible: per layer ``[n, n]`` bool or None, see :class:`~layerskip.scan.target_pass.TargetPass`.
        confidence: ``[N]``: the target's probability of its most likely token at every token of the continuation.
        token_probs: ``[N]``: its probability of the token itself; empty for greedy decoding.
        top_tokens: its most likely tokens after every token of the continuation; None if not requested.
        layer_inputs: per layer the input hidden states ``[1, N, H]`` at every token of the continuation; empty if not
            requested.
    """

    tokens: Tensor
    cache: KVCache
    visible: list[Tensor | None]
    confidence: NDArray[np.float64]
    token_probs: NDArray[np.float64]
    top_tokens: TopTokens | None = None
    layer_inputs: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors. Layers may share a mask, which counts once."""
        masks = {id(mask): mask for mask in self.visible if mask is not None}
        tensors = (self.tokens, *masks.values(), *(self.top_tokens or ()), *self.layer_inputs)
        total: int = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return self.cache.nbytes + total


class TextCache:
    """The states of texts within a budget, kept because reading a text again takes longer than drafting along it.

    Args:
        most_bytes: budget for their tensors.
        top_k: how many of the target's most likely tokens to keep at every position. Tokens beyond the default have almost
            no probability.
    """

    def __init__(self, most_bytes: int, top_k: int = 256) -> None:
        self.most_bytes, self.top_k, self.nbytes = most_bytes, top_k, 0
        self._texts: dict[Continuation, TextStates] = {}

    def get(self, continuation: Continuation, read: Callable[[Continuation], TextStates]) -> TextStates:
        """Return a continuation's states. Call ``read`` if they are missing, and keep its result if it fits the budget."""
        text = self._texts.get(continuation)
        if text is None:
            text = read(continuation)
            if self.nbytes + text.nbytes <= self.most_bytes:
                self._texts[continuation] = text
                self.nbytes += text.nbytes
        return text

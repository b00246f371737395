"""What is kept of one text that the target read? Its keys and values, and what the target thought at every token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from layerskip.models.cache import KVCache
from layerskip.texts.continuations import Continuation


class Likely(NamedTuple):
    """What a target would say, most likely first.

    Args:
        chances: ``[N, k]`` float32.
        tokens: ``[N, k]`` int32.
    """

    chances: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Text:
    """A continuation as the target read it.

    Args:
        tokens: ``[n]`` int64: prompt, continuation, and padding up to the longest continuation.
        cache: the target's keys and values of them.
        visible: per layer ``[n, n]`` bool or None, as :func:`~layerskip.scan.target_pass.read` gives it.
        confidence: ``[N]``: the target's probability of its most likely token at every token of the continuation.
        chances: ``[N]``: its probability of the token itself; empty for greedy decoding.
        likely: its likeliest tokens behind every token of the continuation, if they were asked for.
        entering: per layer the hidden states ``[1, N, H]`` that it was handed at every token of the continuation; empty
            where nobody asked for them.
    """

    tokens: Tensor
    cache: KVCache
    visible: list[Tensor | None]
    confidence: NDArray[np.float64]
    chances: NDArray[np.float64]
    likely: Likely | None = None
    entering: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """What its tensors take."""
        shared = {id(mask): mask for mask in self.visible if mask is not None}
        own = (self.tokens, *shared.values(), *(self.likely or ()), *self.entering)
        beside: int = sum(tensor.numel() * tensor.element_size() for tensor in own)
        return self.cache.nbytes + beside


class Memory:
    """Texts as the target read them, as many as a budget holds: reading one again takes longer than drafting along it.

    Args:
        most_bytes: of their tensors.
        likely: how many of the target's likeliest tokens are kept at every position; beyond so many lies next to nothing.
    """

    def __init__(self, most_bytes: int, likely: int = 256) -> None:
        self.most_bytes, self.likely, self.nbytes = most_bytes, likely, 0
        self._texts: dict[Continuation, Text] = {}

    def recall(self, continuation: Continuation, read: Callable[[Continuation], Text]) -> Text:
        """A continuation's text; one that is not there is read, and kept where there is room."""
        text = self._texts.get(continuation)
        if text is None:
            text = read(continuation)
            if self.nbytes + text.nbytes <= self.most_bytes:
                self._texts[continuation] = text
                self.nbytes += text.nbytes
        return text

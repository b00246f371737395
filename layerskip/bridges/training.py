"""Training of bridges by gradient through the frozen draft, over several drafted tokens in a row.

A draft starts from every position of the target's own continuations, as in a scan (:mod:`layerskip.scan.scan`). While its
tokens are the target's, it continues with the keys and values that it wrote itself. The loss is the cross entropy to the
target's distribution over the tokens that may be drafted (distillation, arXiv 1503.02531, section 2), on inputs that occur
in drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from layerskip.decoding.sampling import Sampling, most_likely
from layerskip.device.memory import AllocationCounter
from layerskip.models.bridge import Bridges
from layerskip.models.cache import KVCache
from layerskip.models.draft_head import DraftHead
from layerskip.models.target import Target
from layerskip.scan.row_model import RowModel
from layerskip.scan.text_batch import TextBatch, TextCache, runs_of
from layerskip.texts.continuations import Continuation

_DISCOUNT = 0.8  # weight of each further token of a draft, relative to the one before


class BridgeTraining:
    """The training loss of bridges.

    Args:
        target: the model; its weights take no gradient from now on.
        bridges: the bridges of a mask, in float32 on the target's device.
        tokens: ``[v]`` int64: the tokens that may be drafted.
        unroll: the most drafted tokens in a row that the loss covers.
        text_cache: states of texts that the target has read. Trainings of other bridges of the same target may share it.

    Raises:
        UnsupportedModel: the model's attention does not support independent rows.
    """

    def __init__(
        self, target: Target, bridges: Bridges, tokens: Tensor, unroll: int, text_cache: TextCache | None = None
    ) -> None:
        target.model.requires_grad_(False)
        self.target, self.bridges, self.unroll = target, bridges, unroll
        self.tokens = tokens.to(target.device)
        self._text_cache = TextCache(0) if text_cache is None else text_cache
        self._places = torch.full((target.vocabulary,), -1, device=target.device)
        self._places[self.tokens] = torch.arange(len(self.tokens), device=target.device)
        self._target_rows, self._draft_rows = RowModel(target.model), RowModel(target.model)
        self._head = DraftHead(target.model, self.tokens, target.vocabulary)
        self._draft_rows.restrict(self._head)

    def loss(self, continuations: Sequence[Continuation], ignore_errors: bool = False) -> Tensor:
        """Return the loss on some of the target's continuations, a float32 scalar.

        With ``ignore_errors``, drafts continue after tokens that are not the target's.
        """
        vocabulary = self.target.vocabulary
        texts = TextBatch(self._target_rows, vocabulary, continuations, Sampling(), text_cache=self._text_cache)
        rows = [(p, s) for p, continuation in enumerate(continuations) for s in range(continuation.starts)]
        total = torch.zeros((), device=self.target.device)
        if not rows:
            return total
        pack = texts.pack(rows, 0)
        cache = _GradientCache(texts.load(pack), pack.end)
        draft_ids = torch.arange(len(rows), device=self.target.device)
        passes: list[tuple[Tensor, int]] = []
        for place in range(self.unroll):
            live = [rows[i] for i in draft_ids.tolist()]
            visible, positions = texts.visible(pack, live, draft_ids, passes, place)
            inputs = texts.tokens([(p, s + place) for p, s in live])
            parts = runs_of([p for p, _ in live])
            self._draft_rows.prepare(visible, [self.bridges.mask], torch.zeros_like(inputs), parts, [self.bridges])
            logits = self._draft_rows.run(inputs, positions, cache)
            cache.keep()
            passes.append((draft_ids, place))
            probs, tokens = texts.top_tokens([(p, s + place + 1) for p, s in live])
            places = self._places[tokens]
            wanted = probs * (places >= 0)  # tokens that may not be drafted cannot be learned
            log_probs = logits.float().log_softmax(-1).gather(-1, places.clamp_min(0))
            total = total - _DISCOUNT**place * (wanted * log_probs).sum(-1).mean()
            if place + 1 == self.unroll:
                break
            own = texts.tokens([(p, s + place + 1) for p, s in live])
            inside = torch.tensor([s + place + 2 <= continuations[p].starts for p, s in live], device=own.device)
            draft_ids = draft_ids[inside & ((self.tokens[most_likely(logits.detach())] == own) | ignore_errors)]
            if not draft_ids.numel():
                break
        return total

    def nbytes(self, *continuations: Continuation) -> int:
        """Return the most bytes that a loss and its gradient allocate, however many drafted tokens become right.

        It includes the target's states of the texts, and their keys and values laid out for drafts, but no weights. It is
        measured with a real gradient, because copies of logits and their gradients outweigh everything that is kept for the
        backward pass.
        """
        text_cache, self._text_cache = self._text_cache, TextCache(0, self._text_cache.top_k)  # reads and counts the texts
        counter = AllocationCounter([self.target.model, self._head, self.bridges])
        try:
            with counter:
                loss = self.loss(continuations, ignore_errors=True)
                torch.autograd.grad(loss, [*self.bridges.parameters()], allow_unused=True)
        finally:
            self._text_cache = text_cache
        return counter.peak


class _GradientLayer(CacheLayerMixin):
    """Keys and values of one layer, through which gradients flow."""

    is_sliding = False
    is_croppable = False
    is_compileable = False

    def __init__(self, owner: _GradientCache, keys: Tensor | None, values: Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self._kept: list[tuple[Tensor, Tensor]] = [] if keys is None or values is None else [(keys, values)]
        self._new: tuple[Tensor, Tensor] | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing; there is nothing to allocate."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the kept states followed by the new ones."""
        self._new = key_states, value_states
        parts = [*self._kept, self._new]
        return torch.cat([keys for keys, _ in parts], 2), torch.cat([values for _, values in parts], 2)

    def keep(self) -> None:
        """Keep the states of the last pass."""
        if self._new is not None:
            self._kept.append(self._new)
            self._new = None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the key length and the offset of the attention mask, as :class:`~layerskip.models.cache.KVCache` does."""
        return self._owner.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the shared length; transformers' interface."""
        return self._owner.length

    def get_max_length(self) -> int:
        """Return -1: the length is unlimited."""
        return -1

    get_max_cache_shape = get_max_length


class _GradientCache(Cache):
    """A cache that starts with another's keys and values and grows by passes through which gradients flow."""

    def __init__(self, first: KVCache, length: int) -> None:
        self.length = length
        self._parts = [
            _GradientLayer(self, None if k is None else k[:, :, :length], None if v is None else v[:, :, :length])
            for k, v in first.states()
        ]
        super().__init__(layers=list(self._parts))

    def keep(self) -> None:
        """Keep the states of the last pass."""
        written = {layer._new[0].shape[2] for layer in self._parts if layer._new is not None}
        for layer in self._parts:
            layer.keep()
        self.length += max(written, default=0)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Return the position of the next pass's first token."""
        return self.length

"""Training of bridges by gradient through the frozen draft, over several drafted tokens in a row.

A draft starts from every position of the target's own continuations, as in a scan (:mod:`layerskip.scan.scan`). While its
tokens are the target's, it continues with the keys and values that it wrote itself. The loss is the cross entropy to the
target's distribution over the tokens that may be drafted (distillation, arXiv 1503.02531, section 2), on inputs that occur
in drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from layerskip.bridges.bridge import Bridges
from layerskip.decoding.sampling import Sampling, most_likely
from layerskip.device.memory import AllocationCounter
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
        bridges: the bridges of a mask, in float32 on the target's device.
        tokens: ``[v]`` int64: the tokens that may be drafted.
        unroll: the most drafted tokens in a row that the loss covers.
        text_cache: states of texts that the target has read. Trainings of other bridges of the same target may share it.
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
            cache.length += len(live)
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

        It includes the target's states of the texts, but no weights. It is measured with a real gradient, because copies of
        logits and their gradients outweigh everything that is kept for the backward pass.
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


class _GradientCache(DynamicCache):
    """A cache that starts with another's keys and values and grows by passes through which gradients flow.

    All layers share one length, as in :class:`~layerskip.models.cache.KVCache`, also those whose attention is skipped.
    """

    def __init__(self, first: KVCache, length: int) -> None:
        super().__init__()
        self.length = length
        for keys, values in first.states():
            layer = DynamicLayer()
            if keys is not None and values is not None:
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys[:, :, :length], values[:, :, :length]
            self.layers.append(layer)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length + query_length, 0

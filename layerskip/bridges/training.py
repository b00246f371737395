"""How do bridges learn from what drafts made of them? By gradient through the frozen draft, several tokens in a row.

From every position of the target's own continuations a draft begins, as in a scan (:mod:`layerskip.scan.scan`); where its token
is the target's, it goes on behind the keys and values that it wrote itself. The loss is the cross entropy to the target's
distribution over the tokens that are drafted (distillation, arXiv 1503.02531, section 2), on inputs as they occur in drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from layerskip.decoding.sampling import Sampling, most_likely
from layerskip.device.memory import Made
from layerskip.models.bridge import Bridges
from layerskip.models.cache import KVCache
from layerskip.models.draft_head import DraftHead
from layerskip.models.target import Target
from layerskip.scan.row_model import RowModel
from layerskip.scan.text_batch import Texts, runs_of
from layerskip.scan.text_cache import Memory
from layerskip.texts.continuations import Continuation

_FADING = 0.8  # weight of each further token of a draft


class BridgeTraining:
    """The loss of bridges.

    Args:
        target: whose drafts they stand in for; its weights take no gradient from now on.
        bridges: of a mask, in float32 on the target's device.
        tokens: ``[v]`` int64: those that are drafted.
        unroll: tokens in a row.
        memory: of texts that the target has read; it may serve other bridges of the same target, too.

    Raises:
        UnsupportedModel: rows cannot be told apart in the model's attention.
    """

    def __init__(self, target: Target, bridges: Bridges, tokens: Tensor, unroll: int, memory: Memory | None = None) -> None:
        target.model.requires_grad_(False)
        self.target, self.bridges, self.unroll = target, bridges, unroll
        self.tokens = tokens.to(target.device)
        self._memory = Memory(0) if memory is None else memory
        self._places = torch.full((target.vocabulary,), -1, device=target.device)
        self._places[self.tokens] = torch.arange(len(self.tokens), device=target.device)
        self._reads, self._drafts = RowModel(target.model), RowModel(target.model)
        self._head = DraftHead(target.model, self.tokens, target.vocabulary)
        self._drafts.narrow(self._head)

    def loss(self, continuations: Sequence[Continuation], never_wrong: bool = False) -> Tensor:
        """The loss on some continuations, a float32 scalar; further tokens count less.

        Args:
            continuations: the target's own.
            never_wrong: whether drafts go on behind tokens that are not the target's, too.
        """
        texts = Texts(self._reads, self.target.vocabulary, continuations, Sampling(), memory=self._memory)
        rows = [(p, s) for p, continuation in enumerate(continuations) for s in range(continuation.starts)]
        total = torch.zeros((), device=self.target.device)
        if not rows:
            return total
        pack = texts.pack(rows, 0)
        cache = _Growing(texts.lay(pack), pack.end)
        number = torch.arange(len(rows), device=self.target.device)
        branches: list[tuple[Tensor, int]] = []
        for place in range(self.unroll):
            live = [rows[i] for i in number.tolist()]
            visible, positions = texts.visible(pack, live, number, branches, place)
            fed = texts.tokens([(p, s + place) for p, s in live])
            of = torch.zeros_like(fed)
            parts = runs_of([p for p, _ in live])
            logits = self._drafts.run(fed, positions, cache, visible, [self.bridges.mask], of, parts, [self.bridges])
            cache.keep()
            branches.append((number, place))
            chances, ids = texts.likely([(p, s + place + 1) for p, s in live])
            places = self._places[ids]
            wanted = chances * (places >= 0)  # what is not drafted from cannot be learnt
            found = logits.float().log_softmax(-1).gather(-1, places.clamp_min(0))
            total = total - _FADING**place * (wanted * found).sum(-1).mean()
            if place + 1 == self.unroll:
                break
            own = texts.tokens([(p, s + place + 1) for p, s in live])
            on = torch.tensor([s + place + 2 <= continuations[p].starts for p, s in live], device=own.device)
            number = number[on & ((self.tokens[most_likely(logits.detach())] == own) | never_wrong)]
            if not number.numel():
                break
        return total

    def nbytes(self, *continuations: Continuation) -> int:
        """The most that continuations take together until their gradient is there, in bytes, however good drafts become.

        The text as the target read it and its keys and values, laid out for drafts, are in it; weights are not counted.
        Copies of logits and their gradients outweigh all that is kept for the gradient, so a real one is taken.
        """
        remembered, self._memory = self._memory, Memory(0, self._memory.likely)  # so that the text is made anew, and counted
        made = Made([self.target.model, self._head, self.bridges])
        try:
            with made:
                loss = self.loss(continuations, never_wrong=True)
                torch.autograd.grad(loss, [*self.bridges.parameters()], allow_unused=True)
        finally:
            self._memory = remembered
        return made.most


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, which gradients pass."""

    is_sliding = False
    is_croppable = False
    is_compileable = False

    def __init__(self, owner: _Growing, keys: Tensor | None, values: Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self._kept: list[tuple[Tensor, Tensor]] = [] if keys is None or values is None else [(keys, values)]
        self._new: tuple[Tensor, Tensor] | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All that was kept, and the new states behind it."""
        self._new = key_states, value_states
        parts = [*self._kept, self._new]
        return torch.cat([keys for keys, _ in parts], 2), torch.cat([values for _, values in parts], 2)

    def keep(self) -> None:
        """Keep what the last pass wrote."""
        if self._new is not None:
            self._kept.append(self._new)
            self._new = None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As of :class:`~layerskip.models.cache.KVCache`."""
        return self._owner.length + query_length, 0

    def get_seq_length(self) -> int:
        """The shared length, as transformers asks for it."""
        return self._owner.length

    def get_max_length(self) -> int:
        """No end."""
        return -1

    get_max_cache_shape = get_max_length


class _Growing(Cache):
    """A cache that begins with another's keys and values and grows by passes that gradients come back through."""

    def __init__(self, first: KVCache, length: int) -> None:
        self.length = length
        self._parts = [
            _Layer(self, None if k is None else k[:, :, :length], None if v is None else v[:, :, :length])
            for k, v in first.states()
        ]
        super().__init__(layers=list(self._parts))

    def keep(self) -> None:
        """Keep what the last pass wrote."""
        written = {layer._new[0].shape[2] for layer in self._parts if layer._new is not None}
        for layer in self._parts:
            layer.keep()
        self.length += max(written, default=0)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Where the next pass's first position lies."""
        return self.length

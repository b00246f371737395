"""Drafting with a trained head over the target's hidden states, as chains or as trees that follow its confidence.

EAGLE (arXiv 2401.15077), algorithm 1, drafts chains. EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees
(arXiv 2406.16858), section 4, grows trees level by level from the branches most likely to be accepted, and keeps the best
tokens of all. The head has its own cache of one layer, which drops rejected tokens like the target's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.config import Method, SpeculativeConfig, StopRule, shared
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.stopping import Stopper, StopRuleDrafter
from layerskip.decoding.tree_growth import LevelwiseTree
from layerskip.device.transfer import copy_to_device
from layerskip.drafters.chain import draft_chain
from layerskip.heads.eagle import EagleHead
from layerskip.heads.folders import load_eagle
from layerskip.heads.readout import Readout
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache
from layerskip.models.graph_capture import CapturingCache
from layerskip.models.prefill import parts_of
from layerskip.models.target import Target


class Eagle(StopRuleDrafter):
    """A drafter with an EAGLE head."""

    method = Method(
        "eagle",
        (
            shared("head"),
            shared("num_speculative_tokens", range=(1, 8), first=3),
            shared("stop", used=lambda config: config.top_k == 1),
            shared("top_k", range=(1, 8), log=True, meaning="branches per level, and tokens of each; 1 drafts chains"),
            shared("tree_tokens", range=(4, 24), used=lambda config: config.top_k > 1),
            shared("min_token_prob", range=(0.005, 0.5), used=lambda config: config.top_k > 1),
        ),
        source="a trained head",
        rank=7,
        color="#8c564b",
        label=lambda config: (
            config.head + (f", trees of {config.tree_tokens}, {config.top_k} wide" if config.top_k > 1 else "")
        ),
        paired=True,
        # Tokens after one that the head was unsure of are seldom accepted.
        also=({"num_speculative_tokens": 5, "top_k": 1, "stop": StopRule("threshold", 0.5)},),
        engine_method="eagle",
    )
    reads_features = True

    def __init__(
        self,
        head: EagleHead,
        target: Target,
        num_speculative_tokens: int,
        stop: StopRule,
        top_k: int = 1,
        tree_tokens: int = 8,
        min_token_prob: float = 0.0,
    ) -> None:
        self.head, self.embeddings = head, target.model.get_input_embeddings()
        self.readout = Readout(target, head.tokens)
        self.num_speculative_tokens, self.top_k, self.min_token_prob = num_speculative_tokens, top_k, min_token_prob
        self.stopper, self.tree_tokens = Stopper(stop), tree_tokens if top_k > 1 else 0
        self._step = _Step(head, self.embeddings, self.readout)

    @classmethod
    def build(cls, config: SpeculativeConfig, target: Target) -> Eagle:
        return cls(target=target, **config.values | {"head": load_eagle(config.head, target)})

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        self._chooser = chooser
        device = self.readout.weight.device
        room = cache.capacity + self.num_speculative_tokens * (1 + self.top_k if self.tree_tokens else 1)
        self._cache = acquire_cache(self.head, 1, room, device, isinstance(cache, CapturingCache), self, [self.embeddings])
        self._reads = device.type == "cpu" and not cache.may_be_static
        self._pending: list[Tensor] = []
        self.readout.begin()

    def observe_features(self, features: Tensor) -> None:
        """Keep the hidden states until the next draft, when the context has the token after each of them."""
        self._pending.append(features)

    def draft(self, context: Context, limit: int) -> Draft:
        """Feed the committed tokens to the head and draft from there."""
        self.readout.follow(context.tokens)
        features = self._feed_early(context.tokens, torch.cat(self._pending))
        verified, count = self._cache.length, features.shape[0]
        known = count + self.head.shape.lookback
        tokens = context.last if known == 1 else copy_to_device(context.tokens[-known:], context.last.device)
        depth = min(limit, self.num_speculative_tokens)
        self._pending = []
        self._step.features, self._step.before = features, tokens[:-count]
        try:
            if not self.tree_tokens:
                pending, few = tokens[-count:], self.readout.tokens
                return draft_chain(self._step, self._cache, pending, depth, self._chooser, self.stopper, vocabulary=few)
            return self._grow(context.last, tokens, count, depth)
        finally:
            self._cache.length = verified + count

    def _feed_early(self, text: Sequence[int], features: Tensor) -> Tensor:
        """Feed all but the last part of the hidden states ``[n, H]`` of a long prompt's last n tokens; return that part."""
        *parts, end = parts_of(features.shape[0])
        for part in parts:
            stop = len(text) - features.shape[0] + part.stop
            start = max(0, stop - (part.stop - part.start) - self.head.shape.lookback)
            self._step.run(copy_to_device(text[start:stop], features.device), features[part], self._cache)
            self._cache.length += part.stop - part.start
        return features[end]

    def _grow(self, last: Tensor, tokens: Tensor, count: int, depth: int) -> Draft:
        """Grow a tree level by level after the last ``tokens``, of which ``count`` are new to the head."""
        cache, back, device = self._cache, self.head.shape.lookback, last.device
        tree = LevelwiseTree(last, self.top_k, self.min_token_prob, self._reads)
        hidden = self._step.run(tokens, self._step.features, cache)[-1:]
        cache.length += count
        begin = cache.length
        # Of each node that is fed: the last tokens up to it, and the columns of the cache that it sees.
        endings = tokens[None, max(0, tokens.shape[0] - back) :]
        visible = (torch.arange(cache.max_length, device=device) < begin)[None]
        for level in range(depth):
            width = min(self.top_k, self.readout.weight.shape[0])
            likely = self.readout(hidden).float().softmax(-1).topk(width, dim=-1)
            parents, chosen = tree.add_level(likely.values, self.readout.tokens_at(likely.indices))
            fed = parents.shape[0]
            if level + 1 == depth or not fed:
                break
            endings = torch.cat((endings.index_select(0, parents), chosen[:, None]), 1)[:, -1 - back :]
            visible = visible.index_select(0, parents)
            visible[:, cache.length : cache.length + fed] = torch.eye(fed, dtype=torch.bool, device=device)
            positions = torch.full((fed,), begin + level, device=device)
            hidden = self._step.run(endings, hidden.index_select(0, parents), cache, positions, visible)
            cache.length += fed
        return tree.draft(self.tree_tokens)


class _Step(nn.Module):
    """The head as a model that predicts the next token of a block. After the target's hidden states it is fed its own."""

    def __init__(self, head: EagleHead, embeddings: nn.Module, readout: Readout) -> None:
        super().__init__()
        self._parts = (head, embeddings, readout)  # in a tuple, which registers no sub-modules
        self.features = torch.empty(0)  # the hidden states to feed next
        self.before = torch.empty(0, dtype=torch.int64)  # the earlier tokens that the head looks back at

    def forward(self, input_ids: Tensor, past_key_values: KVCache, **_: Any) -> SimpleNamespace:
        """Return ``[1, 1, v]`` logits after the last of ``[1, n]`` tokens."""
        head, readout = self._parts[0], self._parts[2]
        tokens = torch.cat((self.before, input_ids[0]))
        hidden = self.run(tokens, self.features, past_key_values)[-1:]
        self.features, self.before = hidden, tokens[max(0, tokens.shape[0] - head.shape.lookback) :]
        return SimpleNamespace(logits=readout(hidden)[None])

    def run(self, tokens: Tensor, features: Tensor, cache: KVCache, *where: Tensor) -> Tensor:
        """Return the hidden states of n tokens, ``[n, H]``, from those before each of them, ``features``, ``[n, H]``.

        Int64 ``tokens`` are ``[m]``, consecutive ones after those that the head looks back at; or ``[n, m]``, a row for
        each, which have ``where``: ``[n]`` int64 positions, and ``[n, max_length]`` bool, the columns of the cache to see.
        """
        head, embeddings, _ = self._parts

        def compute(tokens: Tensor, features: Tensor, *where: Tensor) -> tuple[Tensor, ...]:
            count = features.shape[0]
            if not where:
                return (head(head.with_lookback(embeddings(tokens)[None], count), features[None], cache)[0],)
            positions, visible = where
            keys = cache.get_mask_sizes(count, 0)[0]
            embedded = head.with_lookback(embeddings(tokens), 1).transpose(0, 1)
            return (head(embedded, features[None], cache, positions[None], visible[None, None, :, :keys])[0],)

        inputs = tokens, features, *where
        if isinstance(cache, CapturingCache) and cache.captures(head, features.shape[0]):
            return cache.replay(head, None, inputs, compute, body=head.body)[0]
        return compute(*inputs)[0]

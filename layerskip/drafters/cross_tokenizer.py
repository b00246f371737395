"""Drafting with a smaller model of another tokenizer, on its own cache.

Greedy drafts are re-encoded in the target's tokens: universal assisted generation. If tokens are drawn, the model drafts
tokens that both vocabularies share, so that q is known for every token: token-level intersection, Timor et al.
(arXiv 2502.05202), algorithm 4.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from layerskip.config import ConfigError, Method, SpeculativeConfig, StopRule, shared
from layerskip.decoding.draft import DeviceTree, Draft
from layerskip.decoding.drafter import Context
from layerskip.decoding.sampling import Chooser, to_full_vocabulary
from layerskip.decoding.stopping import Stopper, StopRuleDrafter
from layerskip.decoding.verify import Verdict
from layerskip.device.transfer import copy_to_device, read_to_host
from layerskip.drafters.chain import draft_chain, draft_label, draft_view, load_draft_model
from layerskip.drafters.token_translation import Translation, UnalignedTokenizers, common_prefix
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache
from layerskip.models.draft_head import DraftHead
from layerskip.models.forward import clamp_tokens
from layerskip.models.graph_capture import CapturingCache
from layerskip.models.positions import max_positions
from layerskip.models.prefill import run_prefill
from layerskip.models.target import Target

_MAX_GROWTH = 4  # draft tokens per target token that the cache has capacity for; beyond that nothing is drafted


class CrossTokenizer(StopRuleDrafter):
    """A drafter with a model of another tokenizer.

    Args:
        model: a causal language model.
        layers: the number of its decoder layers.
        vocabulary: the width of its logits.
        translation: between the target's tokens and the model's.
        num_speculative_tokens: the most tokens per round, in the model's tokens.
        stop: when to stop before that.
        head: the reduced vocabulary of the model's output layer, if any.
    """

    method = Method(
        "cross_tokenizer",
        (shared("draft_model"), shared("draft_head"), shared("num_speculative_tokens", range=(1, 8)), shared("stop")),
        source="a smaller model of another tokenizer",
        rank=9,
        color="#17becf",
        short="cross-tok.",
        label=draft_label,
        engine_method="cross_tokenizer",
    )

    def __init__(
        self,
        model: PreTrainedModel,
        layers: int,
        vocabulary: int,
        translation: Translation,
        num_speculative_tokens: int,
        stop: StopRule,
        head: DraftHead | None = None,
    ) -> None:
        self.model, self.layers, self.vocabulary = model, layers, vocabulary
        self.translation, self.num_speculative_tokens, self._head = translation, num_speculative_tokens, head
        self.stopper, self._most = Stopper(stop), max_positions(model)

    @classmethod
    def build(cls, config: SpeculativeConfig, target: Target) -> CrossTokenizer:
        """Load the draft model of a configuration, and align its tokens with the target's."""
        draft = load_draft_model(config, target, same_tokenizer=False)
        assert target.tokenizer is not None
        assert draft.tokenizer is not None
        try:
            translation = Translation(target.tokenizer, draft.tokenizer)
        except UnalignedTokenizers as error:
            raise ConfigError(f"draft_model: {config.draft_model} cannot draft for {target.name}: {error}") from error
        view, head = draft_view(draft, config, draft)
        shared_tokens = {in_draft for own, in_draft in translation.shared if own < target.vocabulary}
        if head is not None and shared_tokens.isdisjoint(head.tokens.tolist()):  # no token could be drawn
            raise ConfigError(f"draft_head: {config.draft_head} shares no token with {target.name}")
        return cls(view, draft.layers, draft.vocabulary, translation, config.num_speculative_tokens, config.stop, head)

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Prefill the model's own cache with the prompt in the model's tokens."""
        device = next(self.model.parameters()).device
        if self._head is not None:
            self._head.begin()
        self._shared = _SharedTokensChooser(chooser, self.vocabulary, self.translation, device)
        self._encoded, self._known = len(prompt), self.translation.to_draft(prompt)
        self._seen = list(self._known)  # all encodings so far: the last tokens of a text may be encoded again
        self._prefill(cache.capacity - len(prompt), isinstance(cache, CapturingCache), device)
        self.stopper.start()

    def _prefill(self, new_tokens: int, captures: bool, device: torch.device) -> None:
        room = len(self._known) + _MAX_GROWTH * (new_tokens + self.num_speculative_tokens)
        room = min(room, self._most or room)
        self._cache = acquire_cache(self.model, self.layers, room, device, captures, self)
        self._fed = self._known[:-1] if len(self._known) <= room else []
        if self._fed:
            run_prefill(self.model, clamp_tokens(self.model, copy_to_device(self._fed, device)), self._cache)

    def draft(self, context: Context, limit: int) -> Draft:
        """Re-encode the committed tokens, feed the new ones, draft, and translate the draft into the target's tokens."""
        device = context.last.device
        known = self.translation.to_draft(context.tokens, self._encoded, self._known)
        self._seen += known[common_prefix(self._known, known) :]
        self._encoded, self._known = len(context.tokens), known
        length = min(limit, self.num_speculative_tokens)
        if not known or len(known) + length > self._cache.capacity:
            return Draft.empty(device)
        self._cache.length = min(common_prefix(self._fed, known), len(known) - 1)
        pending = clamp_tokens(self.model, copy_to_device(known[self._cache.length :], device))
        vocabulary = None if self._head is None else self._head.follow(self._seen)
        chain = draft_chain(self.model, self._cache, pending, length, self._shared, self.stopper, vocabulary=vocabulary)
        (drafted,) = read_to_host(chain.tokens)
        self._fed = [*known, *drafted[:-1]]
        if chain.probs is not None:
            return replace(self._shared.translate(chain.tokens, chain.probs), stopped_at_first=chain.stopped_at_first)
        translated = self.translation.to_target(context.tokens, known, drafted)[:limit]
        tokens = list(itertools.takewhile(lambda token: token < self._shared.width, translated))
        return (
            Draft(copy_to_device(tokens, device), stopped_at_first=chain.stopped_at_first) if tokens else Draft.empty(device)
        )

    def observe(self, verdict: Verdict) -> None:
        """Adapt the stop rule. Rejected tokens are overwritten when the next context is encoded."""
        self.stopper.observe(len(verdict.drafted), verdict.accepted)


class _SharedTokensChooser(Chooser):
    """A choice of the draft's tokens like the target's; drawn tokens are limited to those that the target shares.

    The repetition penalty is left out: it applies to the target's tokens, and q may be any distribution.
    """

    def __init__(self, chooser: Chooser, vocabulary: int, translation: Translation, device: torch.device) -> None:
        super().__init__(replace(chooser.sampling, repetition_penalty=1.0), vocabulary, device)
        self.generator = chooser.generator
        self.width = chooser.vocabulary
        pairs = [pair for pair in translation.shared if pair[0] < self.width and pair[1] < vocabulary]
        self._own, self._in_draft = (copy_to_device(part, device) for part in zip(*pairs, strict=True))
        self._in_target = torch.full((vocabulary,), -1, device=device).index_copy(0, self._in_draft, self._own)

    def distribution(
        self,
        logits: Tensor,
        block: Tensor,
        parents: Sequence[int] | DeviceTree | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Return the distributions over the model's tokens; see :meth:`Chooser.distribution`."""
        if not self.sampling.greedy:
            in_target = self._in_target if tokens is None else self._in_target.index_select(0, tokens)
            logits = logits.masked_fill(in_target < 0, -float("inf"))
        return super().distribution(logits, block, parents, tokens)

    def translate(self, tokens: Tensor, probs: Tensor) -> Draft:
        """Return drawn tokens ``[K]`` and their distributions ``[K, V']`` in the target's tokens."""
        shared_probs = to_full_vocabulary(probs.index_select(1, self._in_draft), self._own, self.width)
        return Draft(self._in_target.index_select(0, tokens), probs=shared_probs)

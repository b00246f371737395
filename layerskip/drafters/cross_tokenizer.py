"""Drafting with a smaller model of another tokenizer, on its own cache.

Greedy drafts are spelled anew in the target's tokens: universal assisted generation. Where tokens are drawn, the model
drafts from the tokens that both vocabularies have, so that q is known token by token: token-level intersection, Timor et al.
(arXiv 2502.05202), algorithm 4.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from layerskip.config import ConfigError, Kind, SpeculativeConfig, StopRule
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Said
from layerskip.decoding.sampling import Chooser, widen
from layerskip.decoding.stopping import Stopped, Stopper
from layerskip.decoding.verify import Verdict
from layerskip.device.upload import upload
from layerskip.drafters.chain import draft_chain
from layerskip.drafters.reduced_vocabulary import draft_label, draft_view, load_draft_model
from layerskip.drafters.registry import register
from layerskip.drafters.token_translation import Translation, UnalignedTokenizers, common_prefix
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache
from layerskip.models.draft_head import DraftHead
from layerskip.models.forward import forward, readable
from layerskip.models.graph_capture import RecordedCache
from layerskip.models.positions import most_positions
from layerskip.models.target import Target

_SPELLED_LONGER = 4  # times as many tokens as the target's: beyond that, nothing is drafted


class CrossTokenizer(Stopped):
    """Drafts with a model that reads other tokens.

    Args:
        model: a causal language model.
        layers: how many decoder layers it has.
        vocabulary: the width of its logits.
        translation: between the target's tokens and its own.
        draft_length: the most tokens, of its own, per round.
        stop: when to stop before that.
        head: that the model was narrowed to, if it was.
    """

    tree_tokens = 0

    def __init__(
        self,
        model: PreTrainedModel,
        layers: int,
        vocabulary: int,
        translation: Translation,
        draft_length: int,
        stop: StopRule,
        head: DraftHead | None = None,
    ) -> None:
        self.model, self.layers, self.vocabulary = model, layers, vocabulary
        self.translation, self.draft_length, self._head = translation, draft_length, head
        self.stopper, self._most = Stopper(stop), most_positions(model)

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Prefill the model's own cache with the prompt as it spells it."""
        device = next(self.model.parameters()).device
        if self._head is not None:
            self._head.begin()
        self._law = _Shared(chooser, self.vocabulary, self.translation, device)
        self._heard, self._known = len(prompt), self.translation.to_draft(prompt)
        self._spelled = list(self._known)  # all that the text was ever spelled with: its last tokens are spelled anew
        self._prefill(cache.room - len(prompt), isinstance(cache, RecordedCache), device)
        self.stopper.start()

    def _prefill(self, new_tokens: int, recorded: bool, device: torch.device) -> None:
        room = len(self._known) + _SPELLED_LONGER * (new_tokens + self.draft_length)
        room = min(room, self._most or room)  # behind it nothing is drafted
        self._cache = acquire_cache(self.model, self.layers, room, device, recorded, self)
        self._fed = self._known[:-1] if len(self._known) <= room else []
        if self._fed:
            forward(self.model, readable(self.model, upload(self._fed, device)), self._cache, last=1)
        self._cache.length = len(self._fed)

    def draft(self, context: Context, limit: int) -> Draft:
        """Spell what was committed, feed what is new of it, draft, and spell that in the target's tokens."""
        device = context.last.device
        known = self.translation.to_draft(context.tokens, self._heard, self._known)
        self._spelled += known[common_prefix(self._known, known) :]
        self._heard, self._known = len(context.tokens), known
        length = min(limit, self.draft_length)
        if not known or len(known) + length > self._cache.room:
            return Draft.empty(device)
        self._cache.length = min(common_prefix(self._fed, known), len(known) - 1)
        pending = readable(self.model, upload(known[self._cache.length :], device))
        few = None if self._head is None else self._head.follow(self._spelled)
        chain = draft_chain(self.model, self._cache, pending, length, self._law, self.stopper, drafted=few)
        drafted = chain.tokens.tolist()
        self._fed = [*known, *drafted[:-1]]
        if chain.probs is not None:
            return replace(self._law.translate(chain.tokens, chain.probs), unsure=chain.unsure)
        spelled = self.translation.to_target(context.tokens, known, drafted)[:limit]
        tokens = list(itertools.takewhile(lambda token: token < self._law.width, spelled))
        return Draft(upload(tokens, device), unsure=chain.unsure) if tokens else Draft.empty(device)

    def observe(self, verdict: Verdict) -> None:
        """Tell the stop rule; what was rejected is overwritten when the next context is spelled."""
        self.stopper.observe(len(verdict.drafted), verdict.accepted)

    def hear(self, said: Said) -> None:
        """Nothing to learn."""


class _Shared(Chooser):
    """Chooses the draft's tokens as the target's are; where they are drawn, only such as the target has, too.

    The repetition penalty is left out: it is of the target's tokens, and q may be any law.
    """

    def __init__(self, chooser: Chooser, vocabulary: int, translation: Translation, device: torch.device) -> None:
        super().__init__(replace(chooser.sampling, repetition_penalty=1.0), vocabulary, device)
        self.generator = chooser.generator
        self.width = chooser.vocabulary
        own, theirs = zip(*(p for p in translation.shared if p[0] < self.width and p[1] < vocabulary), strict=True)
        self._own, self._theirs = upload(own, device), upload(theirs, device)
        self._in_target = torch.full((vocabulary,), -1, device=device).index_copy(0, self._theirs, self._own)

    def distribution(
        self, logits: Tensor, block: Tensor, parents: Sequence[int] | None = None, tokens: Tensor | None = None
    ) -> Tensor:
        """As the target's chooser, over the draft's tokens."""
        if not self.sampling.greedy:
            found = self._in_target if tokens is None else self._in_target.index_select(0, tokens)
            logits = logits.masked_fill(found < 0, -float("inf"))
        return super().distribution(logits, block, parents, tokens)

    def translate(self, tokens: Tensor, probs: Tensor) -> Draft:
        """Drawn tokens ``[K]`` and their laws ``[K, V']`` as the target's."""
        found = widen(probs.index_select(1, self._theirs), self._own, self.width)
        return Draft(self._in_target.index_select(0, tokens), probs=found)


def _build(config: SpeculativeConfig, target: Target) -> CrossTokenizer:
    draft = load_draft_model(config, target, same_tokenizer=False)
    assert target.tokenizer is not None
    assert draft.tokenizer is not None
    try:
        translation = Translation(target.tokenizer, draft.tokenizer)
    except UnalignedTokenizers as error:
        raise ConfigError(f"draft: {config.draft} cannot draft for {target.name}: {error}") from error
    view, head = draft_view(draft, config, draft)
    shared = {theirs for own, theirs in translation.shared if own < target.vocabulary}
    if head is not None and shared.isdisjoint(head.tokens.tolist()):  # no token could be drawn
        raise ConfigError(f"draft_head: {config.draft_head} shares no token with {target.name}")
    return CrossTokenizer(view, draft.layers, draft.vocabulary, translation, config.draft_length, config.stop, head)


register(
    Kind(
        "cross_tokenizer",
        ("draft", "draft_head", "draft_length", "stop"),
        label=draft_label,
        benchmark={"draft": "???", "draft_head": "", "draft_length": 4, "stop": "length"},
    ),
    _build,
)

"""Drafters that record what another one drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, LateRead, VerifyOutput
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.tree import path_to
from layerskip.decoding.verify import Verdict
from layerskip.models.cache import KVCache

Tokens = tuple[int, ...]
AnyDrafter = TypeVar("AnyDrafter", bound=Drafter)


def branches_of(draft: Draft) -> list[Tokens]:
    """The branches that end at each token of a draft."""
    draft = draft.read_shape()
    tokens = draft.tokens.tolist()
    return [tuple(tokens[at] for at in path_to(node, draft.known_parents)) for node in range(len(tokens))]


def started(drafter: AnyDrafter, *prompt: int) -> AnyDrafter:
    """A drafter without a model, at the beginning of a prompt."""
    drafter.start(prompt, None, None)  # type: ignore[arg-type]
    return drafter


def proposed(drafter: Drafter, tokens: list[int], limit: int) -> Draft:
    """The draft of a drafter without a model after some tokens."""
    return drafter.draft(Context(tokens, torch.tensor(tokens[-1:])), limit)


class Recorder(Drafter):
    """Records a drafter's drafts, each as the branches that end at its tokens, with their contexts."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.tree_tokens, self.reads_features = drafter.tree_tokens, drafter.reads_features
        self.reads_logits = drafter.reads_logits
        self.drafts: list[tuple[Tokens, list[Tokens]]] = []

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        self.cache = cache
        self.drafter.start(prompt, cache, chooser)

    def draft(self, context: Context, limit: int) -> Draft:
        length = self.cache.length
        draft = self.drafter.draft(context, limit)
        branches = branches_of(draft)
        assert len(branches) <= (limit if draft.read_shape().parents is None else self.tree_tokens)
        assert all(len(branch) <= limit for branch in branches)
        assert self.cache.length == length
        self.drafts.append((tuple(context.tokens), branches))
        return draft

    def observe_features(self, features: torch.Tensor) -> None:
        self.drafter.observe_features(features)

    def observe(self, verdict: Verdict) -> None:
        self.drafter.observe(verdict)

    def observe_logits(self, output: VerifyOutput) -> Sequence[LateRead]:
        return self.drafter.observe_logits(output)


class Drafted(Exception):
    """Raised after the first draft."""


class FirstDraft(Recorder):
    """Records the first draft and ends the decoding."""

    def draft(self, context: Context, limit: int) -> Draft:
        super().draft(context, limit)
        raise Drafted

"""Autoregressive drafting of a chain with a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from layerskip.decoding.draft import Draft
from layerskip.decoding.sampling import Chooser, to_full_vocabulary
from layerskip.decoding.stopping import Stopper
from layerskip.drafters.siblings import SiblingCollector
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward


def draft_chain(
    model: nn.Module,
    cache: KVCache,
    pending: Tensor,
    limit: int,
    chooser: Chooser,
    stopper: Stopper,
    siblings: SiblingCollector | None = None,
    vocabulary: Tensor | None = None,
) -> Draft:
    """Draft up to ``limit`` tokens; afterwards ``cache.length`` counts every token that was fed.

    Args:
        model: a view of the target, or a model with the target's tokenizer.
        cache: the model's keys and values of all tokens before ``pending``.
        pending: ``[m]`` int64, the tokens that the cache lacks; the last one is the last token of the sequence.
        limit: the most tokens to draft, at least 1.
        chooser: the target's chooser, whose warping the draft must share.
        stopper: decides when to stop before ``limit``.
        siblings: adds siblings to the tokens, which makes the chain a tree; None for a chain.
        vocabulary: ``[v]`` int64, the tokens that the model computes logits of; None for the whole vocabulary.
    """
    tokens: list[Tensor] = []
    distributions: list[Tensor] = []
    stopped = False
    block = fed = pending
    while True:
        logits = forward(model, fed, cache, last=1)
        if vocabulary is None:
            logits = _fit(logits, chooser.vocabulary)
        cache.length += fed.shape[0]
        distribution = chooser.distribution(logits, block, tokens=vocabulary)
        column = chooser.choose(distribution)
        fed = column if vocabulary is None else vocabulary.index_select(0, column)
        tokens.append(fed)
        distributions.append(distribution)
        if siblings is not None:
            siblings.collect(logits, block, distribution, column)
        if len(tokens) == limit or (stopped := stopper.stops(logits)):
            break
        block = torch.cat((block, fed))
    probs = None if chooser.sampling.greedy else torch.cat(distributions)
    if probs is not None and vocabulary is not None:
        probs = to_full_vocabulary(probs, vocabulary, chooser.vocabulary)
    chain = Draft(torch.cat(tokens), probs=probs, stopped_at_first=stopped and len(tokens) == 1)
    return chain if siblings is None else siblings.attach(chain)


def _fit(logits: Tensor, vocabulary: int) -> Tensor:
    """Bring a draft model's ``[1, V']`` logits to the target's width; models of one tokenizer pad it differently."""
    missing = vocabulary - logits.shape[-1]
    return logits if missing == 0 else pad(logits, (0, missing), value=-float("inf"))

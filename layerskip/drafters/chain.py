"""How does a model draft a chain of tokens? One after the other, each from the distribution behind the one before."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from layerskip.decoding.draft import Draft
from layerskip.decoding.sampling import Chooser, widen
from layerskip.decoding.stopping import Stopper
from layerskip.drafters.siblings import Fan
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward


def draft_chain(
    model: nn.Module,
    cache: KVCache,
    pending: Tensor,
    limit: int,
    chooser: Chooser,
    stopper: Stopper,
    fan: Fan | None = None,
    drafted: Tensor | None = None,
) -> Draft:
    """Draft up to ``limit`` tokens, and leave ``cache.length`` behind the last token that was fed.

    Args:
        model: what drafts: a view of the target or a model with the target's tokenizer.
        cache: the model's keys and values of everything before ``pending``.
        pending: ``[m]`` int64, the tokens that the cache lacks; the last one is the sequence's last.
        limit: the most tokens to draft, at least 1.
        chooser: the target's choice of tokens, which the draft's must equal.
        stopper: when to stop before ``limit``.
        fan: gives the tokens siblings; None leaves the chain alone.
        drafted: ``[v]`` int64, the tokens that the model says logits of; None for all.
    """
    tokens: list[Tensor] = []
    distributions: list[Tensor] = []
    stopped = False
    block = fed = pending
    while True:
        logits = forward(model, fed, cache, last=1)
        if drafted is None:
            logits = _fit(logits, chooser.vocabulary)
        cache.length += fed.shape[0]
        distribution = chooser.distribution(logits, block, tokens=drafted)
        place = chooser.choose(distribution)
        fed = place if drafted is None else drafted.index_select(0, place)
        tokens.append(fed)
        distributions.append(distribution)
        if fan is not None:
            fan.see(logits, block, distribution, place)
        if len(tokens) == limit or (stopped := stopper.stops(logits)):
            break
        block = torch.cat((block, fed))
    probs = None if chooser.sampling.greedy else torch.cat(distributions)
    if probs is not None and drafted is not None:
        probs = widen(probs, drafted, chooser.vocabulary)
    chain = Draft(torch.cat(tokens), probs=probs, unsure=stopped and len(tokens) == 1)
    return chain if fan is None else fan.spread(chain)


def _fit(logits: Tensor, vocabulary: int) -> Tensor:
    """Give a draft model's ``[1, V']`` logits the target's width; models of one tokenizer pad it differently."""
    missing = vocabulary - logits.shape[-1]
    return logits if missing == 0 else pad(logits, (0, missing), value=-float("inf"))

"""Autoregressive drafting of a chain with a model, over the whole vocabulary or a part of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from layerskip.config import SpeculativeConfig
from layerskip.decoding.draft import Draft
from layerskip.decoding.sampling import Chooser, to_full_vocabulary
from layerskip.decoding.stopping import Stopper
from layerskip.models.architecture import UnsupportedModel, check_rewind
from layerskip.models.cache import KVCache
from layerskip.models.forward import forward
from layerskip.models.loading import load_draft
from layerskip.models.skip_view import decoding_view
from layerskip.models.target import Target


def draft_chain(
    model: nn.Module,
    cache: KVCache,
    pending: Tensor,
    limit: int,
    chooser: Chooser,
    stopper: Stopper,
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
        vocabulary: ``[v]`` int64, the tokens that the model computes logits of; None for the whole vocabulary.
    """
    tokens: list[Tensor] = []
    distributions: list[Tensor] = []
    block = fed = pending
    while True:
        logits = forward(model, fed, cache, last=1)
        if vocabulary is None and (missing := chooser.vocabulary - logits.shape[-1]):
            # Models of one tokenizer pad their vocabularies differently.
            logits = pad(logits, (0, missing), value=-float("inf"))
        cache.length += fed.shape[0]
        distribution = chooser.distribution(logits, block, tokens=vocabulary)
        distributions.append(distribution)
        column = chooser.choose(distribution)
        fed = column if vocabulary is None else vocabulary.index_select(0, column)
        tokens.append(fed)
        if len(tokens) == limit or stopper.stops(logits):
            break
        block = torch.cat((block, fed))
    drafted = torch.cat(tokens)
    if chooser.sampling.greedy:
        return Draft(drafted)
    probs = torch.cat(distributions)
    return Draft(drafted, probs=probs if vocabulary is None else to_full_vocabulary(probs, vocabulary, chooser.vocabulary))


def load_draft_view(config: SpeculativeConfig, target: Target, same_tokenizer: bool) -> tuple[Target, PreTrainedModel]:
    """Load the draft model that a configuration names and return it with its view for decoding.

    Raises:
        UnsupportedModel: its cache cannot be rewound.
    """
    draft = load_draft(target, config.draft_model, same_tokenizer)
    try:
        check_rewind(draft.model)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"draft_model: {error}") from error
    return draft, decoding_view(draft.model)

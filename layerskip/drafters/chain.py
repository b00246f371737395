"""Autoregressive drafting with a model, and what drafters with a model of their own share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from layerskip.config import SpeculativeConfig, StopRule
from layerskip.decoding.draft import Draft
from layerskip.decoding.sampling import Chooser, to_full_vocabulary
from layerskip.decoding.stopping import Stopper, StopRuleDrafter
from layerskip.device.transfer import copy_to_device
from layerskip.models.architecture import UnsupportedModel, check_rewind
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache
from layerskip.models.forward import clamp_tokens, forward
from layerskip.models.graph_capture import CapturingCache
from layerskip.models.loading import load_draft
from layerskip.models.positions import max_positions
from layerskip.models.prefill import run_prefill
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
    offset: int = 0,
    siblings: int = 0,
) -> Draft:
    """Draft up to ``limit`` tokens in a row, at least one; afterwards ``cache.length`` counts every token that was fed.

    Args:
        model: a view of the target, or a model with the target's tokenizer.
        cache: the model's keys and values of all tokens before ``pending``.
        pending: ``[m]`` int64, the tokens that the cache lacks; the last one is the last token of the sequence.
        chooser: the target's chooser, whose warping the draft must share.
        vocabulary: ``[v]`` int64, the tokens that the model computes logits of; None for the whole vocabulary.
        offset: the number of earlier positions that the cache leaves out.
        siblings: how many more tokens to draft beside each. The draft is then a tree of the likeliest tokens, before any
            warping, which goes on after the first of every place.
    """
    tokens: list[Tensor] = []
    distributions: list[Tensor] = []
    block = fed = pending
    only_largest = chooser.sampling.needs_largest_only and not siblings and stopper.rule.method == "length"
    while True:
        positions = torch.arange(fed.shape[0], device=fed.device) + (cache.length + offset) if offset else None
        logits = forward(model, fed, cache, last=1, positions=positions, only_largest=only_largest)
        if vocabulary is None and (missing := chooser.vocabulary - logits.shape[-1]):
            # Models of one tokenizer pad their vocabularies differently.
            logits = pad(logits, (0, missing), value=-float("inf"))
        cache.length += fed.shape[0]
        if siblings:
            tokens.append(logits[0].topk(min(1 + siblings, logits.shape[-1])).indices)
            if len(tokens) == limit or stopper.stops(logits):
                width = tokens[0].shape[0]
                return Draft(
                    torch.cat(tokens), tuple(max(-1, n // width * width - width) for n in range(width * len(tokens)))
                )
            fed = tokens[-1][:1]
            continue
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


class ModelDrafter(StopRuleDrafter):
    """A drafter with a causal language model of its own, on a cache of its own."""

    def __init__(self, model: PreTrainedModel, layers: int, num_speculative_tokens: int, stop: StopRule) -> None:
        self.model, self.layers, self.num_speculative_tokens = model, layers, num_speculative_tokens
        self.stopper, self._most = Stopper(stop), max_positions(model)

    def _begin(self, target_cache: KVCache, positions: int, prompt: Sequence[int]) -> None:
        """Acquire a cache of a number of positions, captured if the target's is, and read a prompt, which may be empty."""
        self._device = next(self.model.parameters()).device
        captures = isinstance(target_cache, CapturingCache)
        self._cache = acquire_cache(self.model, self.layers, positions, self._device, captures, self)
        if prompt:
            run_prefill(self.model, self._readable(prompt), self._cache)

    def _readable(self, tokens: Sequence[int]) -> Tensor:
        return clamp_tokens(self.model, copy_to_device(tokens, self._device))


def load_draft_view(config: SpeculativeConfig, target: Target, same_tokenizer: bool) -> tuple[Target, PreTrainedModel]:
    """Load the draft model that a configuration names, whose cache must rewind; return it with its view for decoding."""
    draft = load_draft(target, config.draft_model, same_tokenizer)
    try:
        check_rewind(draft.model)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"draft_model: {error}") from error
    return draft, decoding_view(draft.model)

"""Autoregressive drafting of a chain with a model, with siblings of its tokens and a reduced vocabulary if asked for.

Siblings are likely alternatives to the tokens of a chain. SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference
Acceleration (arXiv 2410.06916), section 4.3: the runners-up of every token of the chain are verified with it, more of them
if the draft is less confident. Their number depends only on the draft's distribution. If tokens are drawn, siblings are
drawn from the likely tokens without replacement, which recursive rejection over siblings requires (SpecInfer, arXiv
2305.09781).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from layerskip.config import SpeculativeConfig
from layerskip.decoding.draft import DeviceTree, Draft
from layerskip.decoding.sampling import Chooser, draw, to_full_vocabulary
from layerskip.decoding.stopping import Stopper, portions
from layerskip.device.transfer import read_to_host
from layerskip.models.architecture import UnsupportedModel, check_rewind
from layerskip.models.cache import KVCache
from layerskip.models.draft_head import DraftHead, load_draft_tokens
from layerskip.models.forward import forward
from layerskip.models.loading import load_draft
from layerskip.models.skip_view import decoding_view, shared_copy
from layerskip.models.target import Target


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
        if vocabulary is None and (missing := chooser.vocabulary - logits.shape[-1]):
            # Models of one tokenizer pad their vocabularies differently.
            logits = pad(logits, (0, missing), value=-float("inf"))
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


class SiblingCollector:
    """A collector of the siblings of one chain while it is drafted.

    Args:
        siblings: the most siblings of a token, at least 1.
        min_token_prob: the least probability of a sibling in the draft's distribution.
        chooser: of the decoding.
        root: ``[1]`` int64: the token before the chain.
        reads: whether to read the shape of the tree at once, which costs nothing on a CPU.
        vocabulary: ``[v]`` int64, the tokens that the chain is drafted from; None for the whole vocabulary.
    """

    def __init__(
        self,
        siblings: int,
        min_token_prob: float,
        chooser: Chooser,
        root: Tensor,
        reads: bool,
        vocabulary: Tensor | None = None,
    ) -> None:
        self._root, self._reads, self._vocabulary = root, reads, vocabulary
        self.siblings, self.min_token_prob, self.chooser = siblings, min_token_prob, chooser
        self._columns: list[Tensor] = []  # [siblings] for each token
        self._widths: list[Tensor] = []  # [1] for each token: how many of them count
        self._rows: list[Tensor] = []  # [siblings, v] for each token, if tokens are drawn

    def collect(self, logits: Tensor, block: Tensor, distribution: Tensor, chosen: Tensor) -> None:
        """Choose the siblings of a token, without waiting for the device.

        Args:
            logits: ``[1, v]`` after the block.
            block: as for :meth:`Chooser.distribution`.
            distribution: the chooser's distribution of the logits.
            chosen: ``[1]`` int64, the column of the chosen token.
        """
        if self.chooser.sampling.greedy:
            scores = self.chooser.penalise(logits, block, self._vocabulary)
            probs, others = runners_up(scores, chosen, self.siblings)
            self._widths.append(((probs >= self.min_token_prob) & (probs > 0)).sum(1))
            self._columns.append(others[0])
            return
        probs = distribution[0]
        likely = (probs >= self.min_token_prob) & (probs > 0)
        self._widths.append((likely.sum() - 1).clamp(0, self.siblings)[None])
        remaining = torch.where(likely, probs, 0.0).index_fill(0, chosen, 0.0)
        columns, rows = [], []
        for _ in range(self.siblings):
            total = remaining.sum()
            rows.append(torch.where(total > 0, remaining / total, probs))  # ``probs`` only beyond the width
            columns.append(draw(rows[-1], self.chooser.generator)[None])
            remaining = remaining.index_fill(0, columns[-1], 0.0)
        self._columns.append(torch.cat(columns))
        self._rows.append(torch.stack(rows))

    def attach(self, chain: Draft) -> Draft:
        """Return the chain with its siblings after it."""
        size, each = chain.tokens.shape[0], self._columns[0].shape[0]
        counts = (torch.arange(each, device=chain.tokens.device) < torch.cat(self._widths)[:, None]).flatten()
        # Those that count come first, otherwise in order.
        chosen = counts.byte().sort(descending=True, stable=True).indices
        if self._reads:
            chosen = chosen[: read_to_host(counts.sum())[0]]
        counts = counts.index_select(0, chosen)
        others = torch.cat(self._columns).index_select(0, chosen)
        if self._vocabulary is not None:
            others = self._vocabulary.index_select(0, others)
        above = torch.cat((torch.arange(-1, size - 1, device=chosen.device), torch.where(counts, chosen // each - 1, -1)))
        tree = DeviceTree(above, counts.sum()[None] + size, size, 1 + each)
        probs = None
        if chain.probs is not None:
            rows = torch.cat(self._rows).index_select(0, chosen)
            rows = rows if self._vocabulary is None else to_full_vocabulary(rows, self._vocabulary, self.chooser.vocabulary)
            probs = torch.cat((chain.probs, rows))
        tokens = torch.cat((chain.tokens, torch.where(counts, others, self._root)))
        draft = replace(chain, tokens=tokens, parents=tree, probs=probs)
        return draft.read_shape() if self._reads else draft


def runners_up(scores: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens other than the chosen ones, at most V.

    Takes penalised logits ``[n, V]`` float32 and ``[n]`` int64. Returns ``[n, count]`` float32 probabilities, not
    increasing, and ``[n, count]`` int64 tokens.
    """
    found = []
    for rows, tokens in zip(portions(scores), portions(chosen), strict=True):
        others = rows.scatter(1, tokens[:, None], -float("inf")).topk(min(count, rows.shape[1]))
        found.append(((others.values - rows.logsumexp(-1, keepdim=True)).exp(), others.indices))
    probs, indices = (torch.cat(parts) for parts in zip(*found, strict=True))
    return probs, indices


def load_draft_view(
    config: SpeculativeConfig, target: Target, same_tokenizer: bool
) -> tuple[Target, PreTrainedModel, DraftHead | None]:
    """Load the draft model that a configuration names; ``UnsupportedModel`` if its cache cannot be rewound.

    Returns:
        The model, a view of it with the configured output layer, and its reduced vocabulary if any.
    """
    draft = load_draft(target, config.draft_model, same_tokenizer)
    try:
        check_rewind(draft.model)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"draft_model: {error}") from error
    view = shared_copy(draft.model) if config.draft_head else decoding_view(draft.model)
    # The reduced vocabulary was chosen from the tokens of the target, unless the model has others.
    return draft, view, reduce_output(view, draft.model, config, target if same_tokenizer else draft)


def reduce_output(
    view: PreTrainedModel, model: PreTrainedModel, config: SpeculativeConfig, owner: Target
) -> DraftHead | None:
    """Reduce the output layer of a model's view to the tokens of ``config.draft_head``, if it names one, and return them."""
    if not config.draft_head:
        return None
    head = DraftHead(model, load_draft_tokens(config.draft_head, owner), owner.vocabulary)
    head.restrict(view)
    return head


def draft_label(config: SpeculativeConfig) -> str:
    """Return the draft model and its reduced vocabulary, for a configuration's label."""
    return config.draft_model + (f", {PurePath(config.draft_head).name}" if config.draft_head else "")

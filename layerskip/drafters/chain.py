"""Autoregressive drafting of a chain with a model, with siblings of its tokens and a reduced vocabulary if asked for.

Siblings are likely alternatives to the tokens of a chain. SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference
Acceleration (arXiv 2410.06916), section 4.3: the runners-up of every token of the chain are verified with it, more of them
if the draft is less confident. The tokens of such a tree are the most likely ones, also where the target draws its own.
"""

from __future__ import annotations

from pathlib import PurePath

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from layerskip.config import SpeculativeConfig
from layerskip.decoding.draft import DeviceTree, Draft
from layerskip.decoding.sampling import Chooser, most_likely, to_full_vocabulary
from layerskip.decoding.stopping import Stopper, portions
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
        siblings: adds siblings to the tokens, which makes the chain a deterministic tree; None for a chain.
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
        if siblings is None:
            distribution = chooser.distribution(logits, block, tokens=vocabulary)
            distributions.append(distribution)
            column = chooser.choose(distribution)
        else:
            column = siblings.collect(chooser.penalise(logits, block, vocabulary))
        fed = column if vocabulary is None else vocabulary.index_select(0, column)
        tokens.append(fed)
        if len(tokens) == limit or stopper.stops(logits):
            break
        block = torch.cat((block, fed))
    drafted = torch.cat(tokens)
    if siblings is not None:
        return siblings.attach(drafted)
    if chooser.sampling.greedy:
        return Draft(drafted)
    probs = torch.cat(distributions)
    return Draft(drafted, probs=probs if vocabulary is None else to_full_vocabulary(probs, vocabulary, chooser.vocabulary))


class SiblingCollector:
    """A collector of the siblings of one chain while it is drafted.

    Args:
        siblings: the most siblings of a token, at least 1.
        min_token_prob: the least probability of a sibling in the draft's distribution.
        root: ``[1]`` int64: the token before the chain.
        reads: whether to read the shape of the tree at once, which costs nothing on a CPU.
        vocabulary: ``[v]`` int64, the tokens that the chain is drafted from; None for the whole vocabulary.
    """

    def __init__(
        self, siblings: int, min_token_prob: float, root: Tensor, reads: bool, vocabulary: Tensor | None = None
    ) -> None:
        self.siblings, self.min_token_prob = siblings, min_token_prob
        self._root, self._reads, self._vocabulary = root, reads, vocabulary
        self._columns: list[Tensor] = []  # [siblings] for each token
        self._counts: list[Tensor] = []  # [siblings] bool for each token: which of them count

    def collect(self, scores: Tensor) -> Tensor:
        """Choose the siblings of a token, without waiting for the device.

        Args:
            scores: ``[1, v]`` float32: the penalised logits.

        Returns:
            ``[1]`` int64, the column of the token itself, which is the most likely one.
        """
        column = most_likely(scores)
        probs, others = runners_up(scores, column, self.siblings)
        self._counts.append(((probs >= self.min_token_prob) & (probs > 0))[0])
        self._columns.append(others[0])
        return column

    def attach(self, chain: Tensor) -> Draft:
        """Return the tokens of a chain, ``[K]`` int64, with their siblings after them."""
        size, each = chain.shape[0], self._columns[0].shape[0]
        counts = torch.cat(self._counts)
        # Those that count come first, otherwise in order.
        chosen = counts.byte().sort(descending=True, stable=True).indices
        counts = counts.index_select(0, chosen)
        others = torch.cat(self._columns).index_select(0, chosen)
        if self._vocabulary is not None:
            others = self._vocabulary.index_select(0, others)
        above = torch.cat((torch.arange(-1, size - 1, device=chosen.device), torch.where(counts, chosen // each - 1, -1)))
        tree = DeviceTree(above, counts.sum()[None] + size, size)
        draft = Draft(torch.cat((chain, torch.where(counts, others, self._root))), tree)
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

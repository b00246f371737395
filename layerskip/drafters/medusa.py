"""Drafting with several heads at once: a tree of their likely tokens, from one hidden state.

Medusa (arXiv 2401.10774), section 2.1.2. Candidates are the products of the heads' own likely tokens, the likeliest branches
first; they are verified exactly. Drafting needs no pass of any model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from layerskip.config import Method, SpeculativeConfig, shared
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.tree_growth import LevelwiseTree, grow_tree, reads_while_growing
from layerskip.device.transfer import read_to_host
from layerskip.heads.medusa import MedusaHeads, load_medusa
from layerskip.heads.readout import Readout
from layerskip.models.cache import KVCache
from layerskip.models.cache_pool import acquire_cache
from layerskip.models.graph_capture import CapturingCache
from layerskip.models.target import Target


class Medusa(Drafter):
    """A drafter with Medusa heads."""

    method = Method(
        "medusa",
        (
            shared("head"),
            shared("num_speculative_tokens", range=(1, 8), first=2, meaning="heads that draft"),
            shared("top_k", range=(2, 8), meaning="tokens of each head"),
            shared("tree_tokens", range=(4, 24), first=6),
            shared("min_token_prob", range=(0.005, 0.5)),
        ),
        source="several trained heads",
        rank=6,
        color="#ffd700",
        label=lambda config: f"{config.head}, trees of {config.tree_tokens}, {config.top_k} candidates",
        trees_only=True,
        paired=True,
        engine_method="medusa",
    )
    single_pass = True

    def __init__(
        self,
        heads: MedusaHeads,
        readout: Readout,
        num_speculative_tokens: int,
        top_k: int,
        tree_tokens: int,
        min_token_prob: float,
    ) -> None:
        self.heads, self.readout, self.modules = heads, readout, readout.modules
        self.num_speculative_tokens, self.top_k = min(num_speculative_tokens, heads.shape.heads), top_k
        self.tree_tokens, self.min_token_prob = tree_tokens, min_token_prob

    @classmethod
    def build(cls, config: SpeculativeConfig, target: Target) -> Medusa:
        values = config.values
        heads = load_medusa(values.pop("head"), target)
        return cls(heads, Readout(target, heads.tokens), **values)

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        self.readout.begin()
        device = self.readout.weight.device
        self._reads = reads_while_growing(cache, device)
        # It holds no keys and values, only the captured pass.
        self._captured = acquire_cache(self.heads, 0, 1, device, isinstance(cache, CapturingCache), holder=self)
        self._captured.length = 1

    def observe_features(self, features: Tensor) -> None:
        """Keep the last hidden state, which precedes the last token of the sequence."""
        self._hidden = features[-1]

    def _states(self) -> Tensor:
        """Return what the readout maps to each head's logits, ``[heads, H]``."""
        cache = self._captured
        if isinstance(cache, CapturingCache) and cache.captures(self.heads, 1):
            return cache.replay(self.heads, None, (self._hidden,), lambda hidden: (self.heads(hidden),))[0]
        states: Tensor = self.heads(self._hidden)
        return states

    def draft(self, context: Context, limit: int) -> Draft:
        """Return a tree of the heads' likely tokens."""
        self.readout.follow(context.tokens)
        logits = self.readout(self._states())[: min(limit, self.num_speculative_tokens)]
        probs, places = logits.float().softmax(-1).topk(min(self.top_k, logits.shape[-1]), dim=-1)
        tokens = self.readout.tokens_at(places)
        if self._reads:  # a few tokens grow faster on the host
            rows = zip(*read_to_host(tokens, probs), strict=True)
            levels = [[(*pair, level + 1) for pair in zip(*row, strict=True)] for level, row in enumerate(rows)]
            known, parents, _ = grow_tree(0, levels.__getitem__, len(levels), self.tree_tokens, self.min_token_prob)
            return Draft.of_tree(known, parents, context.last.device)
        tree = LevelwiseTree(context.last, self.tree_tokens, self.min_token_prob, False)
        for level, successors in zip(probs, tokens, strict=True):
            tree.add_level(level[None], successors[None])
        return tree.draft(self.tree_tokens)

"""Drafting from what the target nearly said before: a table of likely successors of every token.

Token Recycling: Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling (arXiv
2408.08696). Each verification leaves, for each of its tokens, the tokens that the target found most likely behind it; a
tree grown from that table is the next draft. No model runs and nothing is trained. The paper's tree has one shape; here it
grows by the probabilities that were recycled with the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerskip.config import Kind, SpeculativeConfig
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Said
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.tree_growth import grow
from layerskip.decoding.verify import Verdict
from layerskip.drafters.registry import register
from layerskip.models.cache import KVCache
from layerskip.models.target import Target


class TokenRecycling:
    """Drafts trees from the table, which it keeps from prompt to prompt until it is told to forget.

    Args:
        draft_length: the depth of a tree, at most.
        tree_tokens: the most tokens of one.
        candidates: so many successors of a token are kept.
        least_probability: a branch ends where the probabilities on it multiply to less.
    """

    learns = True
    finds = True

    def __init__(self, draft_length: int, tree_tokens: int, candidates: int, least_probability: float) -> None:
        self.draft_length = draft_length
        self.tree_tokens = tree_tokens
        self.candidates = candidates
        self.least_probability = least_probability
        self.forget()

    def forget(self) -> None:
        """Empty the table."""
        self._table: dict[int, list[tuple[int, float]]] = {}

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Nothing to prepare: what was learnt from earlier prompts stays."""

    def draft(self, context: Context, limit: int) -> Draft:
        """Grow a tree from the last token, again and again by the likeliest branch; nothing where nothing is known."""
        tokens, parents, chances = self.grow(context.tokens[-1], min(limit, self.draft_length))
        return Draft.of_tree(tokens, parents, context.last.device, found=True, chances=chances)

    def grow(self, root: int, depth: int) -> tuple[list[int], list[int], list[float]]:
        """The tokens of a tree behind a token, no deeper than ``depth``, and the parent and the chances of each."""
        return grow(root, self._successors, depth, self.tree_tokens, self.least_probability)

    def _successors(self, token: int) -> list[tuple[int, float, int]]:
        return [(successor, probability, successor) for successor, probability in self._table.get(token, ())]

    def observe(self, verdict: Verdict) -> None:
        """Nothing to learn from what was accepted."""

    def hear(self, said: Said) -> None:
        """Keep what the target found likely behind every token of the pass, rejected ones too."""
        width = min(self.candidates, said.logits.shape[1])
        chances, successors = said.logits.float().softmax(-1).topk(width, dim=-1)
        # One transfer for all; float64 holds every token id.
        *rows, block = torch.cat((chances.double().T, successors.double().T, said.block.double()[None])).tolist()
        likely = zip(*rows[:width], strict=True), zip(*rows[width:], strict=True)
        for token, odds, tokens in zip(block, *likely, strict=True):
            self._table[int(token)] = [(int(found), chance) for found, chance in zip(tokens, odds, strict=True)]


def _build(config: SpeculativeConfig, target: Target) -> TokenRecycling:
    return TokenRecycling(config.draft_length, config.tree_tokens, config.candidates, config.least_probability)


def _label(config: SpeculativeConfig) -> str:
    return f"trees of {config.tree_tokens}, {config.candidates} candidates, from {config.least_probability:g}"


register(
    Kind(
        "token_recycling",
        ("draft_length", "tree_tokens", "candidates", "least_probability"),
        label=_label,
        lookup=True,
        trees_only=True,
        benchmark={"draft_length": 6, "tree_tokens": 8, "candidates": 4, "least_probability": 0.05},
    ),
    _build,
)

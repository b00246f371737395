"""Drafting from the target's runners-up: a table of likely successors of every token.

Token Recycling: Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling (arXiv
2408.08696). Each verification pass gives, for each of its tokens, the target's most likely next tokens; a tree grown from
that table is the next draft. No model runs and nothing is trained. The paper's tree has a fixed shape; here it grows by the
probabilities that are stored with the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerskip.config import Method, shared
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, LateRead, VerifyOutput
from layerskip.decoding.tree_growth import grow_tree
from layerskip.decoding.verify import Verdict


class TokenRecycling(Drafter):
    """A drafter of trees from the table, which is kept from prompt to prompt until it is reset."""

    method = Method(
        "token_recycling",
        (
            shared("num_speculative_tokens", range=(2, 8), first=6),
            shared("tree_tokens", range=(4, 24)),
            shared("top_k", range=(2, 8)),
            shared("min_token_prob", range=(0.005, 0.5)),
        ),
        source="likely successors seen before",
        rank=3,
        color="#9467bd",
        short="recycling",
        label=lambda config: f"trees of {config.tree_tokens}, {config.top_k} candidates, from {config.min_token_prob:g}",
        lookup=True,
        trees_only=True,
        paired=True,
        no_engine="no engine drafts from a table of successors",
    )
    keeps_state = True

    def __init__(self, num_speculative_tokens: int, tree_tokens: int, top_k: int, min_token_prob: float) -> None:
        self.num_speculative_tokens, self.tree_tokens = num_speculative_tokens, tree_tokens
        self.top_k, self.min_token_prob = top_k, min_token_prob
        self.reset_state()

    def reset_state(self) -> None:
        self._table: dict[int, list[tuple[int, float, int]]] = {}  # successor, probability and, for its own, successor again

    def draft(self, context: Context, limit: int) -> Draft:
        """Grow a tree from the last token; it is empty if the token is not in the table."""
        last, depth = context.tokens[-1], min(limit, self.num_speculative_tokens)
        grown = grow_tree(last, lambda token: self._table.get(token, ()), depth, self.tree_tokens, self.min_token_prob)
        tokens, parents, path_probs = grown
        return Draft.of_lookup(tokens, parents, context.last.device, path_probs=path_probs)

    def observe_logits(self, output: VerifyOutput) -> Sequence[LateRead]:
        """Return the target's likely tokens after every token of the pass, rejected ones included."""
        width = min(self.top_k, output.logits.shape[1])
        probs, successors = output.logits.float().softmax(-1).topk(width, dim=-1)
        # float64 holds every token id.
        likely = torch.cat((output.block[:, None].double(), successors.double(), probs.double()), 1)
        return (LateRead(likely, self._store),)

    def _store(self, verdict: Verdict, likely: list[list[float]]) -> None:
        for token, *row in likely[: 1 + len(verdict.drafted)]:  # tokens that fill up a tree are left out
            half = len(row) // 2
            pairs = zip(map(int, row[:half]), row[half:], strict=True)
            self._table[int(token)] = [(successor, prob, successor) for successor, prob in pairs]

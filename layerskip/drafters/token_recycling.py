"""Drafting from the target's runners-up: a table of likely successors of every token.

Token Recycling: Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling (arXiv
2408.08696). Each verification pass gives, for each of its tokens, the target's most likely next tokens; a tree grown from
that table is the next draft. No model runs and nothing is trained. The paper's tree has a fixed shape; here it grows by the
probabilities that are stored with the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerskip.config import Kind, shared
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, LateRead, VerifyOutput
from layerskip.decoding.tree_growth import grow_tree
from layerskip.decoding.verify import Verdict


class TokenRecycling(Drafter):
    """A drafter of trees from the table, which is kept from prompt to prompt until it is reset.

    Args:
        draft_length: the depth of a tree, at most.
        tree_tokens: the most tokens of a tree.
        candidates: how many successors of each token are kept.
        least_probability: a branch ends where the product of its probabilities falls below this value.
    """

    kind = Kind(
        "token_recycling",
        (
            shared("draft_length", range=(2, 8), first=6),
            shared("tree_tokens", range=(4, 24)),
            shared("candidates", range=(2, 8)),
            shared("least_probability", range=(0.005, 0.5)),
        ),
        source="likely successors seen before",
        rank=3,
        color="#9467bd",
        short="recycling",
        label=lambda config: (
            f"trees of {config.tree_tokens}, {config.candidates} candidates, from {config.least_probability:g}"
        ),
        lookup=True,
        trees_only=True,
        paired=True,
        no_method="no engine drafts from a table of successors",
    )
    keeps_state = True

    def __init__(self, draft_length: int, tree_tokens: int, candidates: int, least_probability: float) -> None:
        self.draft_length = draft_length
        self.tree_tokens = tree_tokens
        self.candidates = candidates
        self.least_probability = least_probability
        self.reset_state()

    def reset_state(self) -> None:
        """Empty the table."""
        self._table: dict[int, list[tuple[int, float]]] = {}

    def draft(self, context: Context, limit: int) -> Draft:
        """Grow a tree from the last token; it is empty if the token is not in the table."""
        tokens, parents, path_probs = self.grow(context.tokens[-1], min(limit, self.draft_length))
        return Draft.of_tree(tokens, parents, context.last.device, lookup=True, path_probs=path_probs)

    def grow(self, root: int, depth: int) -> tuple[list[int], list[int], list[float]]:
        """Return the tokens of a tree after ``root``, at most ``depth`` deep, with their parents and path probabilities."""
        return grow_tree(root, self._successors, depth, self.tree_tokens, self.least_probability)

    def _successors(self, token: int) -> list[tuple[int, float, int]]:
        return [(successor, probability, successor) for successor, probability in self._table.get(token, ())]

    def observe_logits(self, output: VerifyOutput) -> Sequence[LateRead]:
        """Return the target's likely tokens after every token of the pass, rejected ones included."""
        width = min(self.candidates, output.logits.shape[1])
        probs, successors = output.logits.float().softmax(-1).topk(width, dim=-1)
        # float64 holds every token id.
        likely = torch.cat((probs.double().T, successors.double().T, output.block.double()[None]))
        return (LateRead(likely, self._store),)

    def _store(self, verdict: Verdict, likely: list[list[float]]) -> None:
        width = len(likely) // 2
        *rows, block = (row[: 1 + len(verdict.drafted)] for row in likely)  # tokens that fill up a tree are left out
        columns = zip(*rows[:width], strict=True), zip(*rows[width:], strict=True)
        for token, likelihoods, tokens in zip(block, *columns, strict=True):
            self._table[int(token)] = [(int(other), prob) for other, prob in zip(tokens, likelihoods, strict=True)]

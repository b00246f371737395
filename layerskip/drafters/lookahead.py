"""Drafting from guesses that the target corrects while it verifies.

Break the Sequential Dependency of LLM Inference Using Lookahead Decoding (arXiv 2402.02057), section 3. A window of guessed
tokens goes through every pass of verification beside the drafts: each pass says what would follow each guess, so that after
a few passes every column of the window has become an n-gram, and n-grams that begin with the last token are the next
drafts. To verification the window is one more branch: its first row a chain behind the last token, the other rows hanging
from it column by column; so no special mask is needed, and a guess that happens to be right is accepted as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from layerskip.config import Kind
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Said
from layerskip.decoding.sampling import Chooser, most_likely
from layerskip.decoding.tree_growth import grow
from layerskip.decoding.verify import Verdict
from layerskip.device.upload import upload
from layerskip.drafters.registry import register
from layerskip.models.cache import KVCache

Ngram = tuple[int, ...]


class Lookahead:
    """Drafts n-grams from a pool that a window of guesses fills; begins anew with every prompt.

    Args:
        draft_length: tokens of a draft, one less than those of an n-gram; rows of the window.
        window: its columns.
        candidates: so many n-grams are kept, and verified, for each first token.
    """

    at_once = True

    def __init__(self, draft_length: int, window: int, candidates: int) -> None:
        self.draft_length, self.window, self.candidates = draft_length, window, candidates
        self.tree_tokens = draft_length * (window + candidates)
        self._begin([])

    def _begin(self, prompt: Sequence[int]) -> None:
        # Oldest first, as dictionaries keep order.
        self._pool: dict[int, dict[Ngram, None]] = {}
        guesses = itertools.islice(itertools.cycle(prompt), self.window)
        self._rows: list[list[int]] = [list(guesses)]
        self._asked: list[int] | None = None  # where in the block of this pass the window's last row lies
        self._drafted: list[int] = []
        for ngram in zip(*(prompt[start:] for start in range(self.draft_length + 1)), strict=False):
            self._keep(ngram)

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Forget the prompt before; this one gives the first guesses, and its own n-grams."""
        self._begin(prompt)

    def draft(self, context: Context, limit: int) -> Draft:
        """The n-grams that begin with the last token, and the window; without it where it no longer fits."""
        tokens, parents = self._candidates(context.tokens[-1], min(limit, self.draft_length))
        self._asked = None
        if self.window + len(self._rows) - 1 <= limit:
            above = [-1, *range(len(tokens), len(tokens) + self.window - 1)]
            for row in self._rows:
                parents += above
                above = list(range(len(tokens), len(tokens) + self.window))
                tokens += row
            self._asked = [node + 1 for node in above]
        self._drafted = tokens
        return Draft.of_tree(tokens, parents, context.last.device)

    def _candidates(self, token: int, depth: int) -> tuple[list[int], list[int]]:
        """The n-grams behind a token as a tree, their common beginnings shared, the latest first."""
        ngrams = [ngram[:depth] for ngram in reversed(self._pool.get(token, {}))]

        def successors(branch: Ngram) -> list[tuple[int, float, Ngram]]:
            level = len(branch)
            following = [ngram[level] for ngram in ngrams if len(ngram) > level and ngram[:level] == branch]
            return [(found, 1.0, (*branch, found)) for found in dict.fromkeys(following)]

        root: Ngram = ()
        tokens, parents, _ = grow(root, successors, depth, self.draft_length * self.candidates, 0.0)
        return tokens, parents

    def observe(self, verdict: Verdict) -> None:
        """Nothing to learn from what was accepted."""

    def hear(self, said: Said) -> None:
        """What the target says behind the window's last row is its next row; a full column is an n-gram."""
        asked, self._asked = self._asked, None
        count = len(self._drafted)
        if asked is None or said.block.shape[0] != 1 + count:
            return
        row = most_likely(said.logits.index_select(0, upload(asked, said.logits.device)))
        found = torch.cat((said.block[1:], row)).tolist()  # at once, as every copy to the host waits for the device
        if found[:count] != self._drafted:  # another's draft was verified
            return
        self._rows.append(found[count:])
        if len(self._rows) > self.draft_length:
            for column in zip(*self._rows, strict=True):
                self._keep(column)
            del self._rows[0]

    def _keep(self, ngram: Ngram) -> None:
        first, *rest = ngram
        known = self._pool.setdefault(first, {})
        known.pop(tuple(rest), None)
        known[tuple(rest)] = None
        while len(known) > self.candidates:
            del known[next(iter(known))]


register(
    Kind(
        "lookahead",
        ("draft_length", "window", "candidates"),
        label=lambda config: f"window of {config.window}, {config.candidates} candidates",
        trees_only=True,
        benchmark={"draft_length": 2, "window": 4, "candidates": 4},
    ),
    lambda config, target: Lookahead(config.draft_length, config.window, config.candidates),
)

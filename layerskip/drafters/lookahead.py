"""Drafting from guesses that the target corrects while it verifies.

Break the Sequential Dependency of LLM Inference Using Lookahead Decoding (arXiv 2402.02057), section 3. A window of guessed
tokens goes through every verification pass with the drafts. Each pass gives the target's next token after each guess, so
after a few passes every column of the window has become an n-gram; n-grams that begin with the last token are the next
drafts. In the draft tree the window is one more branch: its first row is a chain after the last token, and the other rows
hang from it column by column. It needs no special mask, and a guess that happens to be right is accepted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from layerskip.config import Method, shared
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter, LateRead, VerifyOutput
from layerskip.decoding.sampling import Chooser, most_likely
from layerskip.decoding.verify import Verdict
from layerskip.device.transfer import copy_to_device
from layerskip.models.cache import KVCache

Ngram = tuple[int, ...]


class Lookahead(Drafter):
    """A drafter of n-grams from a pool that a window of guesses fills; pool and window start empty with every prompt.

    An n-gram has ``num_speculative_tokens`` tokens after its first one, and the window as many rows.
    """

    method = Method(
        "lookahead",
        (
            shared("num_speculative_tokens", range=(1, 4), first=2),
            shared("window", range=(1, 8), first=4),
            shared("guess_set_size", range=(2, 8)),
        ),
        source="n-grams from guesses",
        rank=4,
        color="#e377c2",
        label=lambda config: f"window of {config.window}, {config.guess_set_size} candidates",
        trees_only=True,
        no_engine="no engine generates n-grams in a window beside the text",
    )
    single_pass = True

    def __init__(self, num_speculative_tokens: int, window: int, guess_set_size: int) -> None:
        self.num_speculative_tokens, self.window, self.guess_set_size = num_speculative_tokens, window, guess_set_size
        self.tree_tokens = num_speculative_tokens * (window + guess_set_size)

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Begin with the n-grams of the prompt and with guesses taken from it."""
        self._pool: dict[int, list[Ngram]] = {}  # what follows each token, oldest first
        guesses = itertools.islice(itertools.cycle(prompt), self.window)
        self._rows: list[list[int]] = [list(guesses)]
        self._last_row: list[int] | None = None  # the indices of the window's last row in the block of this pass
        self._drafted: list[int] = []
        for ngram in zip(*(prompt[start:] for start in range(self.num_speculative_tokens + 1)), strict=False):
            self._keep(ngram)

    def draft(self, context: Context, limit: int) -> Draft:
        """Return the n-grams that begin with the last token, and the window unless it exceeds ``limit``."""
        tokens, parents = self._candidates(context.tokens[-1], min(limit, self.num_speculative_tokens))
        self._last_row = None
        if self.window + len(self._rows) - 1 <= limit:
            above = [-1, *range(len(tokens), len(tokens) + self.window - 1)]
            for row in self._rows:
                parents += above
                above = list(range(len(tokens), len(tokens) + self.window))
                tokens += row
            self._last_row = [node + 1 for node in above]
        self._drafted = tokens
        return Draft.of_tree(tokens, parents, context.last.device)

    def _candidates(self, token: int, depth: int) -> tuple[list[int], list[int]]:
        """Return the n-grams after a token as a tree that shares their common prefixes, the latest first."""
        nodes: dict[Ngram, int] = {}  # the number of each branch
        for ngram in reversed(self._pool.get(token, ())):
            for level in range(1, depth + 1):
                nodes.setdefault(ngram[:level], len(nodes))
        return [branch[-1] for branch in nodes], [nodes.get(branch[:-1], -1) for branch in nodes]

    def observe_logits(self, output: VerifyOutput) -> Sequence[LateRead]:
        """Return the target's tokens after the last row of the window."""
        last_row, self._last_row = self._last_row, None
        if last_row is None or output.block.shape[0] != 1 + len(self._drafted):
            return ()
        rows = output.logits.index_select(0, copy_to_device(last_row, output.logits.device))
        return (LateRead(most_likely(rows), self._add_row),)

    def _add_row(self, verdict: Verdict, row: list[int]) -> None:
        """Make the target's tokens the window's next row; a full column becomes an n-gram."""
        if list(verdict.drafted) != self._drafted:  # the draft of another drafter was verified
            return
        self._rows.append(row)
        if len(self._rows) > self.num_speculative_tokens:
            for column in zip(*self._rows, strict=True):
                self._keep(column)
            del self._rows[0]

    def _keep(self, ngram: Ngram) -> None:
        first, rest = ngram[0], ngram[1:]
        others = [other for other in self._pool.get(first, ()) if other != rest]
        self._pool[first] = [*others, rest][-self.guess_set_size :]

"""Drafting by repeating the context: find its last tokens earlier on, and propose what followed there.

Prompt lookup decoding (Apoorv Saxena, 2023; LLMA, arXiv 2304.04487, had the idea with a reference text). No model runs, so
a wrong draft costs only the wider verification. A match so near the end that too little follows it is a repetition: copying
goes on with what was just copied, as LZ77 does, and so drafts the repetition's next turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerskip.config import Kind
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Said
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.verify import Verdict
from layerskip.device.upload import upload
from layerskip.drafters.expected_acceptance import LONG
from layerskip.drafters.registry import register
from layerskip.models.cache import KVCache


class PromptLookup:
    """Drafts from an index of the context's n-grams, kept up to date token by token.

    Args:
        ngram_min: the shortest n-gram looked up.
        ngram_max: the longest; longer ones are tried first.
        match: which earlier occurrence wins: ``last`` or ``first``.
        draft_length: the most tokens per round.
    """

    tree_tokens = 0
    finds = True

    def __init__(self, ngram_min: int, ngram_max: int, match: str, draft_length: int) -> None:
        self.sizes = range(ngram_max, ngram_min - 1, -1)
        self.keep_first = match == "first"
        self.draft_length = draft_length

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Forget the prompt before."""
        self.forget()

    def forget(self) -> None:
        """Begin a new text."""
        self._follows: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def draft(self, context: Context, limit: int) -> Draft:
        """Propose what followed the longest n-gram that the context ends with; nothing where none occurred before.

        The match it tells is as long as the texts are alike, which is longer than n-grams are where a text is being copied.
        """
        start, size = self._search(context.tokens)
        if not size:
            return Draft.empty(context.last.device)
        found, match = self._copy(context.tokens, start, limit), _alike(context.tokens, start, size)
        return Draft(upload(found, context.last.device), match=match, found=tuple(found))

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """The same on token ids; ``tokens`` goes on where it stood at the last call."""
        start, size = self._search(tokens)
        return self._copy(tokens, start, limit) if size else []

    def observe(self, verdict: Verdict) -> None:
        """Nothing to learn; the next context has it all."""

    def hear(self, said: Said) -> None:
        """Nothing to learn."""

    def _search(self, tokens: Sequence[int]) -> tuple[int, int]:
        """What follows the longest n-gram that the tokens end with begins where, and how long it is; 0 long if none is."""
        self._index(tokens)
        for size in self.sizes:
            start = self._follows.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if start is not None:
                return start, size
        return 0, 0

    def _index(self, tokens: Sequence[int]) -> None:
        """Index every n-gram that a token follows, which leaves out the one that the context ends with."""
        for end in range(self._indexed, len(tokens)):
            for size in self.sizes:
                if size <= end:
                    ngram = tuple(tokens[end - size : end])
                    if not (self.keep_first and ngram in self._follows):
                        self._follows[ngram] = end
        self._indexed = len(tokens)

    def _copy(self, tokens: Sequence[int], start: int, limit: int) -> list[int]:
        period = len(tokens) - start
        return [tokens[start + i % period] for i in range(min(limit, self.draft_length))]


def _alike(tokens: Sequence[int], start: int, size: int) -> int:
    """How many tokens before ``start`` are those at the end, given that ``size`` are; counted as far as more say more."""
    end = len(tokens)
    while size < min(LONG, start) and tokens[start - size - 1] == tokens[end - size - 1]:
        size += 1
    return size


register(
    Kind(
        "prompt_lookup",
        ("ngram_min", "ngram_max", "match", "draft_length"),
        label=lambda config: f"{config.ngram_min}-{config.ngram_max}-gram, {config.match} match",
        lookup=True,
        benchmark={"ngram_min": 1, "ngram_max": 3, "match": "last", "draft_length": 8},
    ),
    lambda config, target: PromptLookup(config.ngram_min, config.ngram_max, config.match, config.draft_length),
)

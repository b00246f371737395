"""Drafting by repeating the context: find its last tokens earlier on, and propose what followed there.

Prompt lookup decoding (Apoorv Saxena, 2023; LLMA, arXiv 2304.04487, had the idea with a reference text). No model runs, so a
wrong draft costs only the wider verification. If fewer than ``num_speculative_tokens`` tokens follow a match, the text
repeats itself: copying then continues with the copied tokens, as in LZ77.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerskip.config import Method, shared
from layerskip.decoding.draft import MAX_MATCH, Draft
from layerskip.decoding.drafter import Context, Drafter
from layerskip.decoding.sampling import Chooser
from layerskip.device.transfer import copy_to_device
from layerskip.models.cache import KVCache


class PromptLookup(Drafter):
    """A drafter from an index of the context's n-grams, which is updated token by token."""

    method = Method(
        "prompt_lookup",
        (
            shared("prompt_lookup_min", range=(1, 4), first=2),
            shared("prompt_lookup_max", range=(1, 4), first=4),
            shared("match"),
            shared("num_speculative_tokens", range=(2, 16), first=8),
        ),
        source="earlier tokens of the same text",
        rank=1,
        color="#ff7f0e",
        short="lookup",
        label=lambda config: f"{config.prompt_lookup_min}-{config.prompt_lookup_max}-gram, {config.match} match",
        lookup=True,
        second=False,
        also=({"prompt_lookup_min": 1, "prompt_lookup_max": 2, "num_speculative_tokens": 4},),
        engine_method="prompt_lookup",
    )

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int, match: str, num_speculative_tokens: int) -> None:
        self.sizes = range(prompt_lookup_max, prompt_lookup_min - 1, -1)
        self.keep_first = match == "first"
        self.num_speculative_tokens = num_speculative_tokens

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a new text with an empty index."""
        self._follows: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def draft(self, context: Context, limit: int) -> Draft:
        """Propose the continuation of the longest n-gram that ends the context; nothing if none occurred before."""
        start, match = self._search(context.tokens)
        if not match:
            return Draft.empty(context.last.device)
        end, tokens = len(context.tokens), self._copy(context.tokens, start, limit)
        # All tokens before the two places that agree count as the match, not only those of the n-gram.
        while match < min(MAX_MATCH, start) and context.tokens[start - match - 1] == context.tokens[end - match - 1]:
            match += 1
        return Draft(copy_to_device(tokens, context.last.device), match_length=match, lookup_tokens=tuple(tokens))

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return the draft's tokens; ``tokens`` continues those of the last call."""
        start, size = self._search(tokens)
        return self._copy(tokens, start, limit) if size else []

    def _search(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the longest n-gram at the end that occurred before: where its continuation starts, and its length or 0."""
        self._index(tokens)
        for size in self.sizes:
            start = self._follows.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if start is not None:
                return start, size
        return 0, 0

    def _index(self, tokens: Sequence[int]) -> None:
        """Index every n-gram that is followed by a token, which leaves out the one that ends the context."""
        for end in range(self._indexed, len(tokens)):
            for size in self.sizes:
                if size <= end:
                    ngram = tuple(tokens[end - size : end])
                    if not (self.keep_first and ngram in self._follows):
                        self._follows[ngram] = end
        self._indexed = len(tokens)

    def _copy(self, tokens: Sequence[int], start: int, limit: int) -> list[int]:
        period = len(tokens) - start
        return [tokens[start + i % period] for i in range(min(limit, self.num_speculative_tokens))]

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
        drafted, match = self.propose(context.tokens, limit)
        return Draft.of_lookup(drafted, range(-1, len(drafted) - 1), context.last.device, match)

    def propose(self, tokens: Sequence[int], limit: int) -> tuple[list[int], int]:
        """Return the draft's tokens and the length of the match; ``tokens`` continues those of the last call."""
        self._index(tokens)
        for size in self.sizes:
            start = self._follows.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if start is not None:
                match, period = size, len(tokens) - start
                # All tokens before the two places that agree count as the match, not only those of the n-gram.
                while match < min(MAX_MATCH, start) and tokens[start - match - 1] == tokens[-match - 1]:
                    match += 1
                return [tokens[start + i % period] for i in range(min(limit, self.num_speculative_tokens))], match
        return [], 0

    def _index(self, tokens: Sequence[int]) -> None:
        """Index every n-gram that is followed by a token, which leaves out the one that ends the context."""
        for end in range(self._indexed, len(tokens)):
            for size in self.sizes:
                if size <= end:
                    ngram = tuple(tokens[end - size : end])
                    if not (self.keep_first and ngram in self._follows):
                        self._follows[ngram] = end
        self._indexed = len(tokens)

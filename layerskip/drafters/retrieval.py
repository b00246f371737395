"""Drafting from earlier texts: the present text, those of earlier prompts, and a datastore.

The datastore is that of REST (Retrieval-Based Speculative Decoding, arXiv 2311.08252, section 4); the index that grows with
every request is that of SuffixDecoding (arXiv 2411.04975). The longest n-gram that ends the text and occurred before is
looked up, and every occurrence is compared with more of the text. Occurrences that agree with much less of it than the best
one are left out. The continuations of the others form a trie, whose most frequent branches are the draft. As in
SuffixDecoding, a short match gives a small draft. SuffixDecoding finds matches in a suffix tree; here n-grams are found in
an index and extended backwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerskip.config import Method, SpeculativeConfig, shared
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.tree_growth import grow_tree
from layerskip.drafters.datastore import Datastore
from layerskip.models.cache import KVCache
from layerskip.models.target import Target

_MAX_CONTINUATIONS = 32  # of an n-gram, from each source
_LONGEST_MATCH = 64  # tokens; longer matches count as this long
_MIN_SHARE = 0.5  # of the longest match, that the match of another occurrence must have
_TOKENS_PER_MATCH = 10  # drafted tokens per matched token, without a datastore

_Trie = tuple[Sequence[Sequence[int]], int]
"""Continuations that share their first tokens, and the number of these."""


class Retrieval(Drafter):
    """A drafter of continuations in earlier texts. It keeps the texts that it followed until it is reset.

    Args:
        memory: how many tokens of earlier texts are kept, at some hundred bytes each; the oldest texts are dropped first.
    """

    method = Method(
        "retrieval",
        (
            shared("datastore"),
            shared("prompt_lookup_min", range=(1, 4)),
            shared("prompt_lookup_max", range=(1, 4), first=4),
            shared("num_speculative_tokens", range=(2, 16), first=16),
            shared("tree_tokens", range=(4, 24), first=24),
            shared("min_token_prob", range=(0.005, 0.5)),
        ),
        source="earlier texts, and a datastore if there is one",
        rank=2,
        color="#bcbd22",
        label=lambda config: (
            f"{config.prompt_lookup_min}-{config.prompt_lookup_max}-gram, {config.datastore or 'own texts'}, "
            f"trees of {config.tree_tokens} from {config.min_token_prob:g}"
        ),
        lookup=True,
        trees_only=True,
        engine_method="suffix",
        no_engine="no engine drafts from a datastore, or from earlier answers as it does",
    )
    keeps_state = True

    def __init__(
        self,
        datastore: Datastore | None,
        prompt_lookup_min: int,
        prompt_lookup_max: int,
        num_speculative_tokens: int,
        tree_tokens: int,
        min_token_prob: float,
        memory: int = 100_000,
    ) -> None:
        self.datastore = datastore
        self.sizes = range(prompt_lookup_max, prompt_lookup_min - 1, -1)
        self.num_speculative_tokens, self.tree_tokens = num_speculative_tokens, tree_tokens
        self.min_token_prob, self.memory = min_token_prob, memory
        self.reset_state()

    @classmethod
    def build(cls, config: SpeculativeConfig, target: Target) -> Retrieval:
        datastore = Datastore.load(config.datastore, target) if config.datastore else None
        return cls(**config.values | {"datastore": datastore})

    def reset_state(self) -> None:
        """Drop the texts of all prompts; the datastore stays."""
        self._texts: list[list[int]] = [[]]
        self._places: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # n-gram to (text, index of its end)
        self._indexed = 0

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Begin a new text after those that are kept."""
        self._index()  # the last round of the previous text
        if sum(map(len, self._texts)) > self.memory:
            self._drop_oldest()
        self._texts.append([])
        self._indexed = 0

    def draft(self, context: Context, limit: int) -> Draft:
        """Return a tree of what followed the longest matches of the end of the context; nothing if there are none."""
        tokens, depth = context.tokens, min(limit, self.num_speculative_tokens)
        self._texts[-1] = tokens  # which grows on; the next draft, or the next prompt, indexes it
        self._index()
        for size in self.sizes:
            rows, match = self._continuations(tokens, size, depth) if size <= len(tokens) else ([], 0)
            if rows:
                most = self.tree_tokens if self.datastore else min(_TOKENS_PER_MATCH * match, self.tree_tokens)
                trie: _Trie = rows, 0
                grown, parents, path_probs = grow_tree(trie, _successors, depth, most, self.min_token_prob)
                return Draft.of_lookup(grown, parents, context.last.device, match, path_probs)
        return Draft.empty(context.last.device)

    def _index(self) -> None:
        """Index where every n-gram of the present text ends that is followed by a token."""
        number, text = len(self._texts) - 1, self._texts[-1]
        for end in range(self._indexed, len(text)):
            for size in self.sizes:
                if size <= end:
                    places = self._places.setdefault(tuple(text[end - size : end]), [])
                    places.append((number, end))
                    if len(places) > _MAX_CONTINUATIONS:
                        del places[0]
        self._indexed = max(self._indexed, len(text))

    def _drop_oldest(self) -> None:
        """Keep the latest texts, up to half of the memory, and index them again."""
        kept: list[list[int]] = []
        left = self.memory // 2
        for text in reversed(self._texts):
            kept.insert(0, text[-left:])  # the end of a text that is too long
            left -= len(text)
            if left <= 0:
                break
        self.reset_state()
        for text in kept:
            self._texts.append(text)
            self._indexed = 0
            self._index()

    def _continuations(self, tokens: list[int], size: int, length: int) -> tuple[list[list[int]], int]:
        """Return the continuations of an n-gram where most of the text agrees, and the length of the longest match.

        The latest continuation comes first, as it wins ties.
        """
        ngram = tuple(tokens[-size:])
        indexed = self._places.get(ngram, ())
        places = [(_common(self._texts[number], end, tokens, size), number, end) for number, end in indexed]
        match = max((common for common, _, _ in places), default=size)
        rows = []
        for common, number, end in reversed(places):
            if common < _MIN_SHARE * match:
                continue
            text = self._texts[number]
            period = len(text) - end
            # A repetition within the present text is continued with the copied tokens, as in LZ77.
            present = number == len(self._texts) - 1
            rows.append([text[end + i % period] for i in range(length if present else min(length, period))])
        if self.datastore is not None and size >= _MIN_SHARE * match:  # matches in the datastore are not extended
            rows += [row for row in self.datastore.continuations(ngram, length, _MAX_CONTINUATIONS) if row]
        return rows, match


def _common(text: list[int], end: int, tokens: list[int], known: int) -> int:
    """Return how many tokens before a place in a text agree with the end of ``tokens``; ``known`` are known to agree."""
    maximum, here = min(end, len(tokens), _LONGEST_MATCH), len(tokens)
    while known < maximum and text[end - known - 1] == tokens[here - known - 1]:
        known += 1
    return known


def _successors(trie: _Trie) -> list[tuple[int, float, _Trie]]:
    """Return each next token, the share of continuations that have it, and their sub-trie."""
    continuations, depth = trie
    groups: dict[int, list[Sequence[int]]] = {}
    for row in continuations:
        if len(row) > depth:
            groups.setdefault(row[depth], []).append(row)
    return [(token, len(rows) / len(continuations), (rows, depth + 1)) for token, rows in groups.items()]

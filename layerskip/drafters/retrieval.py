"""Drafting from what was written before: in this text, in earlier ones, and in a datastore.

The datastore is REST's (Retrieval-Based Speculative Decoding, arXiv 2311.08252, section 4), the index that grows with every
request SuffixDecoding's (arXiv 2411.04975). The longest n-gram that the text ends with and that was written before is looked
up; places that agree with much less of the text than the best of them are left out, everything that followed the others
becomes a trie, and the trie's most frequent branches the draft. As in SuffixDecoding a short match makes a small draft; it
finds matches in a suffix tree, where here n-grams are found and read on backwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerskip.config import Kind, SpeculativeConfig
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Said
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.tree_growth import grow
from layerskip.decoding.verify import Verdict
from layerskip.drafters.datastore import Datastore
from layerskip.drafters.registry import register
from layerskip.models.cache import KVCache
from layerskip.models.target import Target

_MOST = 32  # continuations of an n-gram from each source
_REACH = 64  # tokens of a match
_SHARE = 0.5  # of the longest match, that another place's has to have
_ROOM = 10  # drafted tokens for each token of a match in own texts


class Retrieval:
    """Drafts what followed before; keeps the texts it drafted for, or followed, until it is told to forget.

    Args:
        datastore: what was written elsewhere; None where there is none.
        ngram_min: the shortest n-gram looked up.
        ngram_max: the longest, tried first; how much more of the text agrees is looked at behind it.
        draft_length: the depth of a tree, at most.
        tree_tokens: the most tokens of one; without a datastore ten for each token of the match, at most.
        least_probability: a branch ends where it followed less often than that.
        memory: so many tokens of earlier texts are kept, some hundred bytes each; the oldest texts go first.
    """

    learns = True
    finds = True

    def __init__(
        self,
        datastore: Datastore | None,
        ngram_min: int,
        ngram_max: int,
        draft_length: int,
        tree_tokens: int,
        least_probability: float,
        memory: int = 100_000,
    ) -> None:
        self.datastore = datastore
        self.sizes = range(ngram_max, ngram_min - 1, -1)
        self.draft_length, self.tree_tokens, self.least_probability = draft_length, tree_tokens, least_probability
        self.memory = memory
        self.forget()

    def forget(self) -> None:
        """Drop the texts of all requests; the datastore stays."""
        self._texts: list[list[int]] = [[]]
        self._places: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # of each n-gram: text, and where it ends in it
        self._indexed = 0

    def start(self, prompt: Sequence[int], cache: KVCache, chooser: Chooser) -> None:
        """Begin a new text behind those that are kept."""
        self._index()  # the last round of the text before
        if sum(map(len, self._texts)) > self.memory:
            self._drop_oldest()
        self._texts.append([])
        self._indexed = 0

    def follow(self, context: Context) -> None:
        """Keep the text where another drafts; it is indexed when next a draft is asked for, or a prompt begins."""
        self._texts[-1] = context.tokens

    def draft(self, context: Context, limit: int) -> Draft:
        """A tree of what followed the longest matches of the context's end; nothing where there are none."""
        tokens, parents, chances, match = self.propose(context.tokens, min(limit, self.draft_length))
        return Draft.of_tree(tokens, parents, context.last.device, match, chances=chances)

    def propose(self, tokens: list[int], depth: int) -> tuple[list[int], list[int], list[float], int]:
        """The same on token ids: the tree's tokens, their parents and chances, and how long the match is; ``tokens`` is read
        on as it grows."""
        self._texts[-1] = tokens
        self._index()
        for size in self.sizes:
            if size <= len(tokens):
                found, match = self._continuations(tokens, size, depth)
                if found:
                    room = self.tree_tokens if self.datastore is not None else min(_ROOM * match, self.tree_tokens)
                    return *grow(_Trie(found), _Trie.successors, depth, room, self.least_probability), match
        return [], [], [], 0

    def observe(self, verdict: Verdict) -> None:
        """Nothing to learn; the next context has it all."""

    def hear(self, said: Said) -> None:
        """Nothing to learn."""

    def _index(self) -> None:
        """Note where every n-gram of the text at work ends that a token follows."""
        number, text = len(self._texts) - 1, self._texts[-1]
        for end in range(self._indexed, len(text)):
            for size in self.sizes:
                if size <= end:
                    places = self._places.setdefault(tuple(text[end - size : end]), [])
                    places.append((number, end))
                    if len(places) > _MOST:
                        del places[0]
        self._indexed = max(self._indexed, len(text))

    def _drop_oldest(self) -> None:
        """Keep the latest texts, as far as half of the memory reaches, and index them anew."""
        kept: list[list[int]] = []
        left = self.memory // 2
        for text in reversed(self._texts):
            kept.insert(0, text[-left:])  # of one that is longer than what is left, its end
            left -= len(text)
            if left <= 0:
                break
        self.forget()
        for text in kept:
            self._texts.append(text)
            self._indexed = 0
            self._index()

    def _continuations(self, tokens: list[int], size: int, length: int) -> tuple[list[list[int]], int]:
        """What followed an n-gram where most of the text agrees, and how much does; the latest first, as it wins ties."""
        ngram = tuple(tokens[-size:])
        found_at = self._places.get(ngram, ())
        places = [(_common(self._texts[number], end, tokens, size), number, end) for number, end in found_at]
        match = max((common for common, _, _ in places), default=size)
        found = []
        for common, number, end in reversed(places):
            if common < _SHARE * match:
                continue
            text = self._texts[number]
            period = len(text) - end
            # Where the text at work repeats itself, it is copied on: LZ77's overlapping copies.
            repeated = number == len(self._texts) - 1
            found.append([text[end + i % period] for i in range(length if repeated else min(length, period))])
        if self.datastore is not None and size >= _SHARE * match:  # how much more agrees there, nobody looks
            found += [part for part in self.datastore.continuations(ngram, length, _MOST) if part]
        return found, match


def _common(text: list[int], end: int, tokens: list[int], known: int) -> int:
    """How many tokens before a place of a text are those that others end with; so many are known to be."""
    most, here = min(end, len(tokens), _REACH), len(tokens)
    while known < most and text[end - known - 1] == tokens[here - known - 1]:
        known += 1
    return known


class _Trie:
    """Continuations, their common beginnings shared."""

    def __init__(self, rows: Sequence[Sequence[int]], depth: int = 0) -> None:
        self.rows, self.depth = rows, depth

    def successors(self) -> list[tuple[int, float, _Trie]]:
        """Each next token, how often it followed, and what follows it."""
        groups: dict[int, list[Sequence[int]]] = {}
        for row in self.rows:
            if len(row) > self.depth:
                groups.setdefault(row[self.depth], []).append(row)
        return [(token, len(rows) / len(self.rows), _Trie(rows, self.depth + 1)) for token, rows in groups.items()]


def _build(config: SpeculativeConfig, target: Target) -> Retrieval:
    datastore = Datastore.load(config.datastore, target) if config.datastore else None
    shape = config.draft_length, config.tree_tokens, config.least_probability
    return Retrieval(datastore, config.ngram_min, config.ngram_max, *shape)


def _label(config: SpeculativeConfig) -> str:
    ngrams = f"{config.ngram_min}-{config.ngram_max}-gram"
    return f"{ngrams}, {config.datastore or 'own texts'}, trees of {config.tree_tokens} from {config.least_probability:g}"


register(
    Kind(
        "retrieval",
        ("datastore", "ngram_min", "ngram_max", "draft_length", "tree_tokens", "least_probability"),
        label=_label,
        lookup=True,
        trees_only=True,
        benchmark={
            "datastore": "",
            "ngram_min": 1,
            "ngram_max": 4,
            "draft_length": 16,
            "tree_tokens": 24,
            "least_probability": 0.05,
        },
    ),
    _build,
)

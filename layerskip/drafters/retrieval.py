"""Drafting from earlier texts: the present text, those of earlier prompts, and a datastore.

The datastore is that of REST (Retrieval-Based Speculative Decoding, arXiv 2311.08252, section 4). The index that grows with
every request is that of SuffixDecoding (arXiv 2411.04975), as is a small draft for a short match; in place of a suffix tree,
n-grams are found in an index and extended backwards. The longest n-gram that ends the text and occurred before is looked up.
Occurrences that agree with much less of the text than the best one are left out. The continuations of the others form a
trie, whose most frequent branches are the draft.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydivsufsort import divsufsort

from layerskip.config import ConfigError, Method, SpeculativeConfig, shared
from layerskip.decoding.draft import Draft
from layerskip.decoding.drafter import Context, Drafter
from layerskip.decoding.sampling import Chooser
from layerskip.decoding.tree_growth import grow_tree
from layerskip.files import atomic_folder, write_json
from layerskip.models.cache import KVCache
from layerskip.models.target import Target

_MAX_CONTINUATIONS = 32  # of an n-gram, from each source
_LONGEST_MATCH = 64  # tokens; longer matches count as this long
_MIN_SHARE = 0.5  # of the longest match, that the match of another occurrence must have
_TOKENS_PER_MATCH = 10  # drafted tokens per matched token, without a datastore
_SCHEMA = "layerskip.datastore/1"
_END = 0  # follows each text; a token is stored as its id plus 1
_MAX_TOKENS = 2**31 - 1

_Trie = tuple[Sequence[Sequence[int]], int]  # continuations that share their first tokens, and the number of these


class Retrieval(Drafter):
    """A drafter of continuations in earlier texts. It keeps the texts that it followed until it is reset."""

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
    memory = 100_000  # tokens of earlier texts, at some hundred bytes each; the oldest texts are dropped first

    def __init__(
        self,
        datastore: Datastore | None,
        prompt_lookup_min: int,
        prompt_lookup_max: int,
        num_speculative_tokens: int,
        tree_tokens: int,
        min_token_prob: float,
    ) -> None:
        self.datastore, self.min_token_prob = datastore, min_token_prob
        self.sizes = range(prompt_lookup_max, prompt_lookup_min - 1, -1)
        self.num_speculative_tokens, self.tree_tokens = num_speculative_tokens, tree_tokens
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
        texts, kept, left = self._texts, list[list[int]](), self.memory // 2
        while left > 0:
            kept.append(texts.pop()[-left:])  # the end of a text that is too long
            left -= len(kept[-1])
        self.reset_state()
        for text in reversed(kept):
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


@dataclass(frozen=True, eq=False)
class Datastore:
    """Texts of one tokenizer, and their suffix array, which finds every occurrence of an n-gram in a few steps.

    A folder, which is read from disk as needed. Building one needs about thirty bytes of memory per token.
    """

    tokens: NDArray[np.int32]  # ``[N]``: the token ids of every text, plus 1, and 0 after each text
    suffixes: NDArray[np.int32]  # ``[N]``: the start of every suffix of ``tokens``, in lexicographic order
    # Numbers of ``texts`` and ``tokens``, ``source``, digests of the ``prompts`` whose outputs it has, ``digest`` of its
    # tokens, ``vocabulary`` and ``tokenizer``.
    about: dict[str, Any]

    @classmethod
    def build(
        cls, texts: Iterable[Sequence[int]], target: Target, source: str = "", prompts: Sequence[str] = ()
    ) -> Datastore:
        """Build the suffix array of texts of the target's token ids; empty ones are left out.

        ``source`` and ``prompts`` are for :attr:`about`. Texts that are empty, too long, or have ids outside the target's
        vocabulary are a :class:`ConfigError`.
        """
        parts = [np.append(np.asarray(text, np.int64) + 1, _END) for text in texts if len(text)]
        if not parts:
            raise ConfigError("corpus: has no tokens")
        joined = np.concatenate(parts)
        if len(joined) > _MAX_TOKENS:
            raise ConfigError(f"corpus: has {len(joined)} tokens; a datastore holds at most {_MAX_TOKENS}")
        if joined.min() < 0 or joined.max() > target.vocabulary:
            raise ConfigError(f"corpus: has token ids outside the target's {target.vocabulary}")
        tokens = joined.astype(np.int32)
        about = {"texts": len(parts), "tokens": len(tokens) - len(parts), "source": source, "prompts": list(prompts)}
        about |= {"digest": hashlib.sha256(tokens.data).hexdigest()} | _identity(target)
        return cls(tokens, np.asarray(divsufsort(tokens), np.int32), about)

    def save(self, folder: Path) -> None:
        """Write into a new folder, completely or not at all; a :class:`ConfigError` if it exists."""
        if folder.exists():
            raise ConfigError(f"output: {folder} exists already")
        with atomic_folder(folder) as partial:
            partial.mkdir()
            np.save(partial / "tokens.npy", self.tokens)
            np.save(partial / "suffixes.npy", self.suffixes)
            write_json(partial / "datastore.json", {"schema": _SCHEMA} | self.about)

    @classmethod
    def load(cls, folder: str | Path, target: Target) -> Datastore:
        """Open a datastore, whose arrays stay on disk; a :class:`ConfigError` if it is damaged or of another tokenizer."""
        folder = Path(folder)
        try:
            about = json.loads((folder / "datastore.json").read_text(encoding="utf-8"))
            tokens, suffixes = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "suffixes"))
        except (OSError, ValueError, EOFError) as error:
            raise ConfigError(f"datastore: cannot read {folder}: {' '.join(str(error).split())}") from error
        whole = isinstance(about, dict) and {"tokens", "texts", "source"} <= about.keys()
        if not whole or not isinstance(about.get("prompts"), list) or about.pop("schema", None) != _SCHEMA:
            raise ConfigError(f"datastore: {folder} is not a datastore of this version")
        for name, value in _identity(target).items():
            if value is not None and about.get(name) != value:
                raise ConfigError(f"datastore: {folder} was built for another {name} than that of {target.name}")
        if any(array.dtype != np.int32 or array.ndim != 1 or not len(array) for array in (tokens, suffixes)):
            raise ConfigError(f"datastore: {folder} is damaged: its arrays are not rows of int32")
        # A token that the target lacks would break decoding; reading all tokens takes little time.
        if hashlib.sha256(tokens.data).hexdigest() != about.get("digest"):
            raise ConfigError(f"datastore: {folder} is damaged: its tokens do not match their digest")
        if len(suffixes) != len(tokens) or suffixes.sum(dtype=np.int64) != len(tokens) * (len(tokens) - 1) // 2:
            raise ConfigError(f"datastore: {folder} is damaged: its suffixes do not start at every token once")
        return cls(tokens, suffixes, about)

    def places(self, ngram: Sequence[int]) -> range:
        """Return the range of ``suffixes`` that begin with an n-gram."""
        stored = [token + 1 for token in ngram]

        def prefix(start: int) -> list[int]:
            return list(map(int, self.tokens[start : start + len(stored)]))

        low = bisect_left(self.suffixes, stored, key=prefix)
        return range(low, bisect_right(self.suffixes, stored, lo=low, key=prefix))

    def continuations(self, ngram: Sequence[int], length: int, maximum: int) -> list[list[int]]:
        """Return up to ``length`` tokens after at most ``maximum`` occurrences of an n-gram, spread evenly over all."""
        places = self.places(ngram)
        count = min(maximum, len(places))
        starts = (int(self.suffixes[places[index * len(places) // count]]) + len(ngram) for index in range(count))
        parts = (self.tokens[start : start + length].tolist() for start in starts)
        return [[token - 1 for token in itertools.takewhile(lambda token: token != _END, part)] for part in parts]


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


def _identity(target: Target) -> dict[str, Any]:
    """Return the fields that give token ids their meaning; the tokenizer is None for a target without one."""
    return {"vocabulary": target.vocabulary, "tokenizer": target.tokenizer_digest}

"""What was written before, and what followed? Texts in a suffix array: every place of any n-gram, in a few steps.

REST: Retrieval-Based Speculative Decoding (arXiv 2311.08252), section 4.1. A datastore belongs to a tokenizer, lies in a
folder of its own and is read from the disk as needed; building one takes some thirty bytes of memory a token. libdivsufsort
sorts it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydivsufsort import divsufsort

from layerskip.config import ConfigError
from layerskip.files import full_disk_told, write_json
from layerskip.models.target import Target

_SCHEMA = "layerskip.datastore/1"
_END = 0  # of a text; a token is stored as its id plus one
_MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Datastore:
    """Texts, and the order of all their endings.

    Args:
        tokens: ``[N]`` int32: every text's tokens, plus one each, and 0 behind it.
        suffixes: ``[N]`` int32: where the endings of ``tokens`` begin, in lexicographic order.
        about: what it was built of: how many ``texts`` and ``tokens``, the ``source``, the ids of the prompts whose outputs
            are in it as ``prompts``, the ``digest`` of its tokens, ``vocabulary`` and ``tokenizer``.
    """

    tokens: NDArray[np.int32]
    suffixes: NDArray[np.int32]
    about: dict[str, Any]

    @classmethod
    def build(
        cls, texts: Iterable[Sequence[int]], target: Target, source: str = "", prompts: Sequence[str] = ()
    ) -> Datastore:
        """Sort texts.

        Args:
            texts: token ids of the target's tokenizer; empty ones are left out.
            target: whose ids they are.
            source: where they came from, for people.
            prompts: digests of what the prompts say whose outputs are among the texts.

        Raises:
            ConfigError: there is nothing in them, more than can be sorted, or an id that the target does not have.
        """
        parts = [np.append(np.asarray(text, np.int64) + 1, _END) for text in texts if len(text)]
        if not parts:
            raise ConfigError("corpus: has no tokens")
        joined = np.concatenate(parts)
        if len(joined) > _MOST_TOKENS:
            raise ConfigError(f"corpus: has {len(joined)} tokens; a datastore holds {_MOST_TOKENS} at most")
        if joined.min() < 0 or joined.max() > target.vocabulary:
            raise ConfigError(f"corpus: has token ids outside the target's {target.vocabulary}")
        tokens = joined.astype(np.int32)
        about = {"texts": len(parts), "tokens": len(tokens) - len(parts), "source": source, "prompts": list(prompts)}
        about |= {"digest": _digest(tokens)} | _identity(target)
        return cls(tokens, np.asarray(divsufsort(tokens), np.int32), about)

    def save(self, folder: Path) -> None:
        """Write into a folder that does not exist yet, whole or not at all.

        Raises:
            ConfigError: something is there already.
        """
        if folder.exists():
            raise ConfigError(f"output: {folder} exists already")
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            with full_disk_told(folder, partial / "more"):
                np.save(partial / "tokens.npy", self.tokens)
                np.save(partial / "suffixes.npy", self.suffixes)
            write_json(partial / "datastore.json", {"schema": _SCHEMA} | self.about)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    @classmethod
    def load(cls, folder: str | Path, target: Target) -> Datastore:
        """Open a datastore; its arrays stay on the disk.

        Raises:
            ConfigError: it is missing, empty or damaged, or belongs to another tokenizer.
        """
        folder = Path(folder)
        try:
            about = json.loads((folder / "datastore.json").read_text(encoding="utf-8"))
            arrays = [np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in ("tokens.npy", "suffixes.npy")]
        except (OSError, ValueError, EOFError) as error:
            raise ConfigError(f"datastore: cannot read {folder}: {' '.join(str(error).split())}") from error
        if not isinstance(about, dict) or about.pop("schema", None) != _SCHEMA:
            raise ConfigError(f"datastore: {folder} is not a datastore of this version")
        tokens, suffixes = arrays
        if any(array.dtype != np.int32 or array.ndim != 1 or not len(array) for array in arrays):
            raise ConfigError(f"datastore: {folder} is damaged: its arrays are not rows of int32")
        counts = [value for name in ("tokens", "texts") if isinstance(value := about.get(name), int)]
        if len(counts) != 2 or not len(tokens) == len(suffixes) == sum(counts):
            raise ConfigError(f"datastore: {folder} is damaged: its parts are not equally long")
        if not isinstance(about.get("source"), str) or not isinstance(about.get("prompts"), list):
            raise ConfigError(
                f"datastore: {folder} is damaged, or of an earlier version: it does not say of what texts it was built"
            )
        for name, value in _identity(target).items():
            if value is not None and about.get(name) != value:
                raise ConfigError(f"datastore: {folder} was built for another {name} than that of {target.name}")
        # Tokens that the target does not have would end decoding; 10 million take 0.1 s to read.
        if _digest(tokens) != about.get("digest"):
            raise ConfigError(f"datastore: {folder} is damaged: its tokens are not those that it was built of")
        if int(suffixes.sum(dtype=np.int64)) != len(suffixes) * (len(suffixes) - 1) // 2:
            raise ConfigError(f"datastore: {folder} is damaged: its suffixes do not begin at every token once")
        return cls(tokens, suffixes, about)

    def places(self, ngram: Sequence[int]) -> range:
        """Which entries of ``suffixes`` begin with an n-gram."""
        wanted = [token + 1 for token in ngram]
        size = len(wanted)

        def beginning(start: int) -> list[int]:
            return list(map(int, self.tokens[start : start + size]))

        low = bisect_left(self.suffixes, wanted, key=beginning)
        return range(low, bisect_right(self.suffixes, wanted, lo=low, key=beginning))

    def continuations(self, ngram: Sequence[int], length: int, most: int) -> list[list[int]]:
        """What followed an n-gram.

        Args:
            ngram: at least one token.
            length: so many tokens of each continuation; less where a text ended.
            most: so many continuations, evenly spread over all that there are.
        """
        places = self.places(ngram)
        found = []
        for index in range(min(most, len(places))):
            start = int(self.suffixes[places[index * len(places) // min(most, len(places))]]) + len(ngram)
            part = self.tokens[start : start + length].tolist()
            found.append([token - 1 for token in (part[: part.index(_END)] if _END in part else part)])
        return found


def _digest(tokens: NDArray[np.int32]) -> str:
    return hashlib.sha256(tokens.data).hexdigest()


def _identity(target: Target) -> dict[str, Any]:
    """What token ids mean something to; None of a target whose tokenizer nobody gave."""
    return {"vocabulary": target.vocabulary, "tokenizer": target.tokenizer_digest}

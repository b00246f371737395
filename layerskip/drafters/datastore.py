"""``Datastore``: texts with a suffix array, which finds every occurrence of an n-gram in a few steps.

REST: Retrieval-Based Speculative Decoding (arXiv 2311.08252), section 4.1. A datastore belongs to a tokenizer and is a
folder that is read from disk as needed. Building one needs about thirty bytes of memory per token; libdivsufsort sorts it.
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
from layerskip.files import beside, report_full_disk, write_json
from layerskip.models.target import Target

_SCHEMA = "layerskip.datastore/1"
_END = 0  # follows each text; a token is stored as its id plus 1
_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Datastore:
    """Texts and their suffix array.

    Args:
        tokens: ``[N]`` int32: the token ids of every text, plus 1, and 0 after each text.
        suffixes: ``[N]`` int32: the start of every suffix of ``tokens``, in lexicographic order.
        about: how it was built: the number of ``texts`` and ``tokens``, the ``source``, the digests of the ``prompts`` whose
            outputs it has, the ``digest`` of its tokens, the ``vocabulary`` and the ``tokenizer``.
    """

    tokens: NDArray[np.int32]
    suffixes: NDArray[np.int32]
    about: dict[str, Any]

    @classmethod
    def build(
        cls, texts: Iterable[Sequence[int]], target: Target, source: str = "", prompts: Sequence[str] = ()
    ) -> Datastore:
        """Build the suffix array of texts of token ids; empty ones are left out.

        Args:
            texts: token ids of the target's tokenizer.
            target: the target.
            source: a description of where the texts came from.
            prompts: digests of the prompts whose outputs are among the texts.

        Raises:
            ConfigError: the texts are empty, too long, or have ids outside the target's vocabulary.
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
        about |= {"digest": _digest(tokens)} | _identity(target)
        return cls(tokens, np.asarray(divsufsort(tokens), np.int32), about)

    def save(self, folder: Path) -> None:
        """Write into a new folder, completely or not at all.

        Raises:
            ConfigError: the folder exists.
        """
        if folder.exists():
            raise ConfigError(f"output: {folder} exists already")
        partial = beside(folder, "partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            with report_full_disk(folder, partial / "more"):
                np.save(partial / "tokens.npy", self.tokens)
                np.save(partial / "suffixes.npy", self.suffixes)
            write_json(partial / "datastore.json", {"schema": _SCHEMA} | self.about)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    @classmethod
    def load(cls, folder: str | Path, target: Target) -> Datastore:
        """Open a datastore; its arrays stay on disk.

        Raises:
            ConfigError: it is missing, empty or damaged, or belongs to another tokenizer.
        """
        folder = Path(folder)
        try:
            about = json.loads((folder / "datastore.json").read_text(encoding="utf-8"))
            arrays = [np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in ("tokens.npy", "suffixes.npy")]
        except (OSError, ValueError, EOFError) as error:
            raise ConfigError(f"datastore: cannot read {folder}: {' '.join(str(error).split())}") from error
        whole = isinstance(about, dict) and {"tokens", "texts", "source"} <= about.keys()
        if not whole or not isinstance(about.get("prompts"), list) or about.pop("schema", None) != _SCHEMA:
            raise ConfigError(f"datastore: {folder} is not a datastore of this version")
        for name, value in _identity(target).items():
            if value is not None and about.get(name) != value:
                raise ConfigError(f"datastore: {folder} was built for another {name} than that of {target.name}")
        tokens, suffixes = arrays
        if any(array.dtype != np.int32 or array.ndim != 1 or not len(array) for array in arrays):
            raise ConfigError(f"datastore: {folder} is damaged: its arrays are not rows of int32")
        # A token that the target lacks would break decoding; reading all tokens takes little time.
        if _digest(tokens) != about.get("digest"):
            raise ConfigError(f"datastore: {folder} is damaged: its tokens do not match their digest")
        if len(suffixes) != len(tokens) or int(suffixes.sum(dtype=np.int64)) != len(tokens) * (len(tokens) - 1) // 2:
            raise ConfigError(f"datastore: {folder} is damaged: its suffixes do not start at every token once")
        return cls(tokens, suffixes, about)

    def places(self, ngram: Sequence[int]) -> range:
        """Return the range of ``suffixes`` that begin with an n-gram."""
        stored = [token + 1 for token in ngram]
        size = len(stored)

        def prefix(start: int) -> list[int]:
            return list(map(int, self.tokens[start : start + size]))

        low = bisect_left(self.suffixes, stored, key=prefix)
        return range(low, bisect_right(self.suffixes, stored, lo=low, key=prefix))

    def continuations(self, ngram: Sequence[int], length: int, maximum: int) -> list[list[int]]:
        """Return at most ``maximum`` continuations of an n-gram, spread evenly over all occurrences.

        Each has ``length`` tokens, or fewer at the end of a text.
        """
        places = self.places(ngram)
        count = min(maximum, len(places))
        continuations = []
        for index in range(count):
            start = int(self.suffixes[places[index * len(places) // count]]) + len(ngram)
            part = self.tokens[start : start + length].tolist()
            continuations.append([token - 1 for token in (part[: part.index(_END)] if _END in part else part)])
        return continuations


def _digest(tokens: NDArray[np.int32]) -> str:
    return hashlib.sha256(tokens.data).hexdigest()


def _identity(target: Target) -> dict[str, Any]:
    """Return the fields that give token ids their meaning; the tokenizer is None for a target without one."""
    return {"vocabulary": target.vocabulary, "tokenizer": target.tokenizer_digest}

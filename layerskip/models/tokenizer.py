"""Does a model come with a tokenizer? With one that spells text, or with none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

_PARTS = ("token", "vocab", "merges", "piece", "spm", "bpe", "tekken")
"""What the names of files have in them that tokenizers are read from."""
_NOT_ALONE = ("special_tokens_map.json", "added_tokens.json")


def load_tokenizer(source: str, options: Mapping[str, Any]) -> Any:
    """The tokenizer of a model; None where there is none.

    Of a folder without a tokenizer's files, transformers makes up special tokens for some families, and takes the files for
    broken ones of others.

    Args:
        source: a folder or a hub id.
        options: as ``from_pretrained`` takes them; a GGUF file has its tokenizer in itself.
    """
    folder = Path(source)
    if folder.is_dir() and "gguf_file" not in options and not any(_is_of_one(file.name) for file in folder.iterdir()):
        return None
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    return tokenizer if len(tokenizer) > len(set(tokenizer.all_special_tokens)) else None


def _is_of_one(name: str) -> bool:
    return name not in _NOT_ALONE and any(part in name.lower() for part in _PARTS)

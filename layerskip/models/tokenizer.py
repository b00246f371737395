"""Loading of tokenizers, and detection of models that have none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

_NAME_PARTS = ("token", "vocab", "merges", "piece", "spm", "bpe", "tekken")
"""Parts of the names of tokenizer files."""
_SUPPLEMENTS = ("special_tokens_map.json", "added_tokens.json")


def load_tokenizer(source: str, options: Mapping[str, Any]) -> Any:
    """Load the tokenizer of a model; None if it has none.

    For a folder without tokenizer files, transformers invents special tokens for some model families, and reports broken
    files for others.

    Args:
        source: a folder or a hub id.
        options: of ``from_pretrained``; a GGUF file contains its tokenizer.
    """
    folder = Path(source)
    if (
        folder.is_dir()
        and "gguf_file" not in options
        and not any(_is_tokenizer_file(file.name) for file in folder.iterdir())
    ):
        return None
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    return tokenizer if len(tokenizer) > len(set(tokenizer.all_special_tokens)) else None


def _is_tokenizer_file(name: str) -> bool:
    return name not in _SUPPLEMENTS and any(part in name.lower() for part in _NAME_PARTS)

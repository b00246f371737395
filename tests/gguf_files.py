"""GGUF files that are parsed once."""

from __future__ import annotations

import functools

import gguf
import pytest


def reading_once(patch: pytest.MonkeyPatch) -> None:
    """Keep what was parsed of a GGUF file, which saves two thirds of the time of loading a model from it.

    Transformers parses the file three times and builds the table of names once per tensor; here each is made once.
    """
    for name in ("GGUFReader", "get_tensor_name_map"):
        patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))

"""Transformers' own decoding is counted by what is found of its private parts, and whatever they are called."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from transformers.generation import utils

from searches.benchmarking import peers


def test_a_private_function_may_be_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(utils, "_speculative_sampling")
    spec = importlib.util.spec_from_file_location("searches.peers_of_another_release", peers.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, again)  # where dataclasses look
    spec.loader.exec_module(again)
    assert again._ASKS_OF_DRAFTS is False

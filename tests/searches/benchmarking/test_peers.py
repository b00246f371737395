"""Tests of transformers' decoding methods as contenders."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from transformers.generation import utils

from searches.benchmarking import peers


def test_a_release_without_the_private_function_counts_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(utils, "_speculative_sampling")
    spec = importlib.util.spec_from_file_location("searches.peers_of_another_release", peers.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, again)  # dataclasses look it up
    spec.loader.exec_module(again)
    assert again._CALLS_ON_DRAFTS is False

"""Continuations of prompts, against decoding, and how often they are made."""

from __future__ import annotations

from pathlib import Path

from layerskip import PromptSet, Sampling, Target, generate
from layerskip.passages import continue_prompts


def test_continuations_are_made_once(tiny_target: Target, tmp_path: Path) -> None:
    prompts = PromptSet.of(["one two", "three"])
    heard: list[int] = []
    first = continue_prompts(tiny_target, prompts, Sampling(), 6, folder=tmp_path)
    again = continue_prompts(tiny_target, prompts, Sampling(), 6, folder=tmp_path, on_prompt=lambda: heard.append(1))
    other = continue_prompts(tiny_target, prompts, Sampling(), 5, folder=tmp_path)
    assert first == again
    assert len(heard) == 2
    assert [p.tokens[:5] for p in first] == [p.tokens for p in other]
    assert list(first[0].tokens) == generate(tiny_target, "one two", max_new_tokens=6).tokens

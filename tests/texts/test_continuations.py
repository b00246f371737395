"""Continuations of prompts, against decoding, and how often they are made."""

from __future__ import annotations

from pathlib import Path

from layerskip import PromptSet, Sampling, Target, generate
from layerskip.texts.continuations import continue_prompts


def test_continuations_are_made_once(tiny_target: Target, tmp_path: Path) -> None:
    prompts = PromptSet.of(["one two", "three"])
    heard: list[int] = []
    first = continue_prompts(tiny_target, prompts, Sampling(), 6, folder=tmp_path)
    said: list[tuple[str, float, float]] = []
    again = continue_prompts(
        tiny_target, prompts, Sampling(), 6, 0, tmp_path, lambda: heard.append(1), lambda *use: said.append(use)
    )
    other = continue_prompts(tiny_target, prompts, Sampling(), 5, folder=tmp_path)
    assert first == again
    assert len(heard) == len({name for name, _, _ in said}) == 2
    assert all(took > 0 and here == 0 for _, took, here in said)  # whoever made them, it was not done now
    assert [p.tokens[:5] for p in first] == [p.tokens for p in other]
    assert list(first[0].tokens) == generate(tiny_target, "one two", max_new_tokens=6).tokens

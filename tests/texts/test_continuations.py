"""Continuations of prompts: equal to decoding, and decoded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerskip import PromptSet, Sampling, Target, generate
from layerskip.texts.continuations import continue_prompts


def test_continuations_are_decoded_once(tiny_target: Target, tmp_path: Path) -> None:
    prompts = PromptSet.of(["one two", "three"])
    prompts_done: list[int] = []
    first = continue_prompts(tiny_target, prompts, Sampling(), 6, folder=tmp_path)
    costs: list[tuple[str, float, float]] = []
    again = continue_prompts(
        tiny_target, prompts, Sampling(), 6, 0, tmp_path, lambda: prompts_done.append(1), lambda *cost: costs.append(cost)
    )
    other = continue_prompts(tiny_target, prompts, Sampling(), 5, folder=tmp_path)
    assert first == again
    assert len(prompts_done) == len({name for name, _, _ in costs}) == 2
    assert all(total > 0 and now == 0 for _, total, now in costs)  # decoded earlier, not in the second call
    assert [p.tokens[:5] for p in first] == [p.tokens for p in other]
    assert list(first[0].tokens) == generate(tiny_target, "one two", max_new_tokens=6).tokens


@pytest.mark.parametrize("text", ['{"continuations": []}', "[]", "{"])
def test_a_damaged_continuation_is_decoded_again(text: str, tiny_target: Target, tmp_path: Path) -> None:
    prompts = PromptSet.of(["one two"])
    first = continue_prompts(tiny_target, prompts, Sampling(), 6, folder=tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    file.write_text(text)
    assert continue_prompts(tiny_target, prompts, Sampling(), 6, folder=tmp_path) == first
    assert file.read_text().partition('"seconds"')[0] == whole.partition('"seconds"')[0]

"""What the costs of cascades are timed for, and how often."""

from __future__ import annotations

from typing import Any

import pytest

from layerskip import Sampling, SpeculativeConfig, Target
from searches.study.cascade_costs import CostTimer, spread_contexts


@pytest.mark.parametrize(
    ("lengths", "contexts"),
    [
        ([100, 200, 900], [384]),  # short
        ([3000, 4000, 5900], [4288]),  # alike
        ([200, 8000], [192, 8000]),
        ([300, 2000, 8000], [320, 1984, 8000]),
        ([300, 7000, 8000], [320, 8000]),
    ],
)
def test_far_apart_contexts_are_timed_apart(lengths: list[int], contexts: list[int]) -> None:
    assert spread_contexts(lengths) == contexts


def test_equal_members_are_timed_once_at_every_context(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []

    def time_at(_: Target, __: SpeculativeConfig, context: int, *___: Any, **____: Any) -> float:
        timed.append(context)
        return context / 10

    monkeypatch.setattr("searches.study.cascade_costs.time_drafting", time_at)
    one, two = (CostTimer(tiny_target, Sampling(), contexts, 0) for contexts in ([9], [9, 40]))
    known: dict[str, float] = {}
    lookup, other = SpeculativeConfig("prompt_lookup"), SpeculativeConfig("layer_skip", 5, mask="attention:1")
    skip, longer = (SpeculativeConfig("layer_skip", length, mask="layers:1") for length in (3, 5))
    for _ in range(2):
        assert one.draft_costs((lookup, skip, longer), known) == (0.0, 0.9, 0.9)
        assert two.draft_costs((lookup, skip), known) == ((9, (0.0, 0.9)), (40, (0.0, 4.0)))
        assert one.draft_costs((lookup, other), known) == (0.0, 0.9)
        assert one.draft_costs((lookup, lookup), known) == ()
    assert timed == [9, 9, 40, 9]

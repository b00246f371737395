"""How often the costs of cascades are timed."""

from __future__ import annotations

from typing import Any

import pytest

from layerskip import Sampling, SpeculativeConfig, Target
from searches.study.cascade_costs import CostTimer


def test_equal_members_are_timed_once(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def time_at(_: Target, config: SpeculativeConfig, context: int, *__: Any, **___: Any) -> float:
        timed.append(config.mask)
        return context / 10

    monkeypatch.setattr("searches.study.cascade_costs.time_drafting", time_at)
    timer, known = CostTimer(tiny_target, Sampling(), 9, 0), dict[str, float]()
    lookup, other = SpeculativeConfig("prompt_lookup"), SpeculativeConfig("layer_skip", 5, mask="attention:1")
    skip, longer = (SpeculativeConfig("layer_skip", length, mask="layers:1") for length in (3, 5))
    for _ in range(2):
        assert timer.draft_costs((lookup, skip, longer), known) == (0.0, 0.9, 0.9)
        assert timer.draft_costs((lookup, other), known) == (0.0, 0.9)
        assert timer.draft_costs((lookup, lookup), known) == ()
    assert timed == ["layers:1", "attention:1"]

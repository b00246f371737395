"""How often the costs of cascades are timed."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from layerskip import Sampling, SpeculativeConfig, Target
from searches.study.cascade_costs import CostTimer


def test_equal_members_are_timed_once(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Mock(side_effect=lambda target, config, context, *_, **__: context / 10)
    monkeypatch.setattr("searches.study.cascade_costs.time_drafting", timed)
    timer, known = CostTimer(tiny_target, Sampling(), 9, 0), dict[str, float]()
    lookup, other = SpeculativeConfig("prompt_lookup"), SpeculativeConfig("layer_skip", 5, mask="attention:1")
    skip, longer = (SpeculativeConfig("layer_skip", length, mask="layers:1") for length in (3, 5))
    for _ in range(2):
        assert timer.draft_costs((lookup, skip, longer), known) == (0.0, 0.9, 0.9)
        assert timer.draft_costs((lookup, other), known) == (0.0, 0.9)
        assert timer.draft_costs((lookup, lookup), known) == ()
    assert [call.args[1].mask for call in timed.call_args_list] == ["layers:1", "attention:1"]

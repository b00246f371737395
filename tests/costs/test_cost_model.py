"""Tests that a cost profile adds up to its formula, and that a measured one is complete."""

from __future__ import annotations

import json

import pytest

from layerskip import DraftPlan, StopRule
from layerskip.costs.cost_model import CostProfile, in_steps
from layerskip.scan.replay import Counts

PROFILE = CostProfile(10, 1.0, 0.5, (2.0, 3.0), (4.0, 5.0), 0.25, 0.5, (20.0, 21.0, 24.0))


@pytest.mark.parametrize(
    ("mask", "seconds"),
    [("", 16.0), ("attention:0", 14.0), ("mlp:1", 11.0), ("layers:0", 9.5), ("layers:0-1", 1.0)],
)
def test_a_draft_pass_costs_what_it_keeps(mask: str, seconds: float) -> None:
    assert PROFILE.draft_seconds(DraftPlan.parse(mask, 2)) == seconds


def test_seconds_follow_from_counts() -> None:
    counts = Counts(tokens=7, verified=(1, 1, 2))
    mask = DraftPlan.parse("layers:0", 2)
    assert PROFILE.seconds(counts, mask, StopRule()) == pytest.approx(5 * 9.5 + 3 * 0.5 + 20 + 21 + 2 * 24)
    assert PROFILE.seconds(counts, mask, StopRule("threshold", 0.5)) == pytest.approx(5 * 9.75 + 3 * 0.5 + 20 + 21 + 2 * 24)
    assert PROFILE.speedup(counts, mask, StopRule()) == pytest.approx(7 * 20 / (5 * 9.5 + 1.5 + 89))
    with pytest.raises(ValueError, match="verified"):
        PROFILE.seconds(Counts(1, (0, 0, 0, 1)), mask, StopRule())
    assert PROFILE.lookup_speedup(counts) == pytest.approx(7 * 20 / 89)
    assert CostProfile.from_dict(json.loads(json.dumps(PROFILE.to_dict()))) == PROFILE


def test_a_step_that_was_disturbed_gives_costs_of_at_least_one() -> None:
    assert in_steps([1.4, 0.1, 1.5, 2.8]) == (1.0, 1.07, 2.0)

"""Tests that a cost profile adds up to its formula, and that a measured one is complete."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from layerskip import SkipMask, StopRule
from layerskip.bridges.bridge import BridgeShape
from layerskip.costs.cost_model import CostProfile, DraftExtras, in_steps
from layerskip.scan.replay import Counts

PROFILE = CostProfile(10, 1.0, 0.5, (2.0, 3.0), (4.0, 5.0), 0.25, 0.5, (20.0, 21.0, 24.0))


@pytest.mark.parametrize(
    ("mask", "seconds"),
    [("", 16.0), ("attention:0", 14.0), ("mlp:1", 11.0), ("layers:0", 9.5), ("layers:0-1", 1.0)],
)
def test_a_draft_pass_costs_what_it_keeps(mask: str, seconds: float) -> None:
    assert PROFILE.draft_seconds(SkipMask.parse(mask, 2)) == seconds


def test_bridges_and_a_draft_head_change_the_cost() -> None:
    profile = replace(PROFILE, module_seconds=0.5, map_seconds=0.25, number_seconds=0.01, token_seconds=0.002)
    mask = SkipMask.parse("layers:0", 2)
    extras = DraftExtras(**BridgeShape("layers:0", 2, 4, "linear").size, left_out=100)
    assert extras == DraftExtras(1, 20, 100, 1)
    assert profile.draft_seconds(mask, extras) == pytest.approx(9.5 + 0.5 + 0.25 + 0.2 - 0.2)
    mean = DraftExtras(**BridgeShape("layers:0", 2, 4, "mean").size)
    assert profile.draft_seconds(mask, mean) == pytest.approx(9.5 + 0.5 + 0.04)
    counts = Counts(rounds=4, drafted=5, accepted=3, tokens=7, verified=(1, 1, 2))
    assert profile.seconds(counts, mask, StopRule(), extras) - profile.seconds(counts, mask, StopRule()) == pytest.approx(
        5 * 0.75
    )


def test_seconds_follow_from_counts() -> None:
    counts = Counts(rounds=4, drafted=5, accepted=3, tokens=7, verified=(1, 1, 2))
    mask = SkipMask.parse("layers:0", 2)
    assert PROFILE.seconds(counts, mask, StopRule()) == pytest.approx(5 * 9.5 + 3 * 0.5 + 20 + 21 + 2 * 24)
    assert PROFILE.seconds(counts, mask, StopRule("threshold", 0.5)) == pytest.approx(5 * 9.75 + 3 * 0.5 + 20 + 21 + 2 * 24)
    assert PROFILE.speedup(counts, mask, StopRule()) == pytest.approx(7 * 20 / (5 * 9.5 + 1.5 + 89))
    with pytest.raises(ValueError, match="verified"):
        PROFILE.seconds(Counts(1, 3, 0, 1, (0, 0, 0, 1)), mask, StopRule())
    for profile in (PROFILE, replace(PROFILE, others=(replace(PROFILE, context=30),))):
        assert CostProfile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_a_step_that_was_disturbed_gives_costs_of_at_least_one() -> None:
    assert in_steps([1.4, 0.1, 1.5, 2.8]) == (1.0, 1.07, 2.0)


def test_costs_between_measured_contexts_are_interpolated() -> None:
    """The second attention has a window, so that its cost stops growing at the second measured context."""
    longer = replace(PROFILE, context=30, attention_seconds=(4.0, 6.0), verify_seconds=(25.0, 27.0, 32.0))
    longest = replace(longer, context=50, attention_seconds=(6.0, 6.0), verify_seconds=(27.0, 29.0, 36.0))
    profile = replace(PROFILE, others=(longer, longest))
    for context, attention, verified in (
        (0, (2.0, 3.0), (20.0, 21.0, 24.0)),
        (15, (2.5, 3.75), (21.25, 22.5, 26.0)),
        (40, (5.0, 6.0), (26.0, 28.0, 34.0)),
        (80, (6.0, 6.0), (27.0, 29.0, 36.0)),
    ):
        found = profile.at(context)
        assert found.context == min(50, max(10, context))
        assert found.attention_seconds == pytest.approx(attention)
        assert found.verify_seconds == pytest.approx(verified)
        assert (found.mlp_seconds, found.others) == (pytest.approx(PROFILE.mlp_seconds), ())
    assert PROFILE.at(99) is PROFILE
    assert CostProfile.mean([PROFILE, longer], [1, 3]).verify_seconds == pytest.approx((23.75, 25.5, 30.0))

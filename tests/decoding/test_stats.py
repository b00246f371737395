"""Counts of rounds and their ratios, worked out by hand."""

from __future__ import annotations

import pytest

from layerskip.decoding.stats import DecodeStats, Round

# The last round ended at an accepted token: 2 tokens accepted, 2 committed, no bonus token.
FIRST = DecodeStats((Round(4, 4, 5), Round(4, 1, 2), Round(0, 0, 1), Round(3, 2, 2)))


def test_ratios_of_rounds() -> None:
    assert (FIRST.drafted, FIRST.accepted) == (11, 7)
    assert FIRST.acceptance_rate == pytest.approx(7 / 11)
    assert FIRST.mean_acceptance_length == pytest.approx(10 / 4)
    # Rounds of 5, 2, 1 and 2 tokens: three have a second one, and one goes on to the fifth.
    assert FIRST.acceptance_length_histogram == {1: 1, 2: 2, 5: 1}
    assert FIRST.conditional_acceptance_rate == pytest.approx({1: 4 / 4, 2: 3 / 4, 3: 1 / 3, 4: 1 / 1, 5: 1 / 1})
    # Three rounds drafted a first to third token, and two a fourth; of a tree, depths count.
    assert FIRST.acceptance_by_position == pytest.approx((3 / 3, 2 / 3, 1 / 3, 1 / 2))
    trees = DecodeStats((Round(9, 2, 3, depth=3), Round(4, 0, 1, depth=1)))
    assert (trees.acceptance_by_position, trees.acceptance_rate) == ((1 / 2, 1.0, 0.0), 2 / 13)


def test_without_rounds_or_drafts_every_ratio_is_zero() -> None:
    for stats, length in ((DecodeStats.join([]), 0.0), (DecodeStats((Round(0, 0, 1), Round(0, 0, 1))), 1.0)):
        assert (stats.acceptance_rate, stats.mean_acceptance_length, stats.acceptance_by_position) == (0.0, length, ())
    assert (stats.acceptance_length_histogram, stats.conditional_acceptance_rate) == ({1: 2}, {1: 1.0})
    assert (DecodeStats().acceptance_length_histogram, DecodeStats().conditional_acceptance_rate) == ({}, {})

"""Counts of rounds and their ratios, worked out by hand."""

from __future__ import annotations

import pytest

from layerskip.decoding.stats import DecodeStats, Round

# The last round ended at an accepted token: 2 tokens accepted, 2 committed, no bonus token.
FIRST = DecodeStats((Round(4, 4, 5), Round(4, 1, 2), Round(0, 0, 1), Round(3, 2, 2)))
SECOND = DecodeStats((Round(1, 0, 1),))


def test_ratios_of_one_decoding() -> None:
    assert (FIRST.drafted, FIRST.accepted) == (11, 7)
    assert FIRST.acceptance_rate == pytest.approx(7 / 11)
    assert FIRST.mean_acceptance_length == pytest.approx(10 / 4)


def test_acceptance_by_position_counts_only_rounds_that_drafted_that_position() -> None:
    # Three rounds drafted a first to third token (4+, 4+, 3), and two a fourth.
    assert FIRST.acceptance_by_position == pytest.approx((3 / 3, 2 / 3, 1 / 3, 1 / 2))
    assert SECOND.acceptance_by_position == (0.0,)


def test_the_positions_of_a_tree_are_its_depths() -> None:
    trees = DecodeStats((Round(9, 2, 3, depth=3), Round(4, 0, 1, depth=1)))
    assert trees.acceptance_by_position == (1 / 2, 1.0, 0.0)
    assert trees.acceptance_rate == 2 / 13


def test_without_rounds_or_drafts_every_ratio_is_zero() -> None:
    for stats in (DecodeStats(), DecodeStats.join([])):
        assert (stats.acceptance_rate, stats.mean_acceptance_length) == (0.0, 0.0)
        assert stats.acceptance_by_position == ()
    plain = DecodeStats((Round(0, 0, 1), Round(0, 0, 1)))
    assert (plain.acceptance_rate, plain.mean_acceptance_length, plain.acceptance_by_position) == (0.0, 1.0, ())

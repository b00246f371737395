"""The contexts at which the costs of cascades are timed."""

from __future__ import annotations

import pytest

from searches.study.cascade_costs import spread_contexts


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

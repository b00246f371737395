"""Stop rules: the adaptive threshold against values worked out by hand from the paper's rule."""

from __future__ import annotations

import pytest

from layerskip.config import StopRule
from layerskip.decoding.stopping import Stopper


def test_the_adaptive_threshold_follows_the_acceptance_rate_until_it_is_reset() -> None:
    """The first round's rate counts alone; each later one is averaged with the past, half and half."""
    stopper = Stopper(StopRule("adaptive", 0.6))
    rounds = [
        (4, 4, 0.600 - 0.001),  # rate 1, above 0.9: 0.9 * 0.6 + 0.1 * (0.6 - 0.01)
        (16, 14, 0.599 - 0.001),  # rate 0.5 * 1 + 0.5 * 0.875 = 0.9375, still above
        (0, 0, 0.598),  # nothing drafted, no change
        (2, 0, 0.598 + 0.001),  # rate 0.46875
        (1, 1, 0.599 + 0.001),  # rate 0.734375, still at most 0.9
        (8, 8, 0.600 + 0.001),  # rate 0.8671875
        (3, 3, 0.601 - 0.001),  # rate 0.93359375
    ]
    for _ in range(2):
        for drafted, accepted, expected in rounds:
            stopper.observe(drafted, accepted)
            assert stopper.threshold == pytest.approx(expected)
        stopper.reset()


@pytest.mark.parametrize(("start", "accepted", "end"), [(0.9995, 0, 1.0), (0.0005, 4, 0.0)])
def test_the_threshold_stays_a_probability(start: float, accepted: int, end: float) -> None:
    stopper = Stopper(StopRule("adaptive", start))
    stopper.observe(4, accepted)
    assert stopper.threshold == end

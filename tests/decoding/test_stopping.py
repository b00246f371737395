"""Stop rules: the adaptive threshold against values worked out by hand from the paper's rule."""

from __future__ import annotations

import pytest

from layerskip.config import StopRule
from layerskip.decoding.stopping import Stopper

RULE = StopRule(
    method="adaptive", threshold=0.6, target_acceptance=0.7, step=0.2, acceptance_decay=0.5, threshold_decay=0.75
)


def test_the_adaptive_threshold_follows_the_acceptance_rate() -> None:
    """The first round's rate counts alone; each later one is averaged with the past, half and half here."""
    stopper = Stopper(RULE)
    stopper.start()
    rounds = [
        (4, 4, 0.60 - 0.05),  # rate 1, above 0.7: 0.75 * 0.6 + 0.25 * (0.6 - 0.2)
        (4, 2, 0.55 - 0.05),  # rate 0.5 * 1 + 0.5 * 0.5 = 0.75, still above
        (0, 0, 0.50),  # nothing drafted, no change
        (2, 0, 0.50 + 0.05),  # rate 0.375
        (1, 1, 0.55 + 0.05),  # rate 0.6875, still at most 0.7
        (3, 3, 0.60 - 0.05),  # rate 0.84375
    ]
    for drafted, accepted, expected in rounds:
        stopper.observe(drafted, accepted)
        assert stopper.threshold == pytest.approx(expected)


@pytest.mark.parametrize(("start", "accepted", "end"), [(0.9, 0, 1.0), (0.4, 4, 0.0)])
def test_the_threshold_stays_a_probability(start: float, accepted: int, end: float) -> None:
    rule = StopRule(method="adaptive", threshold=start, target_acceptance=0.5, step=1.0, threshold_decay=0.0)
    stopper = Stopper(rule)
    stopper.start()
    stopper.observe(4, accepted)
    assert stopper.threshold == end


@pytest.mark.parametrize("carry", [True, False])
def test_a_threshold_carries_over_to_the_next_prompt_only_if_configured(carry: bool) -> None:
    stopper = Stopper(StopRule(**(RULE.to_dict() | {"carry": carry})))
    stopper.start()
    assert stopper.threshold == pytest.approx(0.6)
    stopper.observe(4, 4)
    stopper.start()
    assert stopper.threshold == pytest.approx(0.55 if carry else 0.6)
    # A rate of 0.5 alone is below the target; averaged with the first prompt's 1 it is above.
    stopper.observe(4, 2)
    assert stopper.threshold == pytest.approx(0.5 if carry else 0.65)
    stopper.reset()
    stopper.observe(4, 2)
    assert stopper.threshold == pytest.approx(0.65)

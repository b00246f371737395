"""Stability of clear and of random choices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from layerskip import SkipMask
from searches.predict.stability import seed_stability, stability

MASKS = [SkipMask.parse(text, 10) for text in ("layers:1-4", "layers:5-8", "attention:0-7")]


def test_a_clear_choice_is_stable() -> None:
    seconds = np.array([[1.0] * 6, [2.0] * 6, [3.0] * 6])
    found = stability(MASKS, seconds, np.full(6, 2.0), 20)
    assert (found.share, found.overlap) == (1.0, 1.0)
    assert found.chance == pytest.approx(0.26, abs=0.04)  # two sets of 8 out of 20


def test_a_choice_that_one_continuation_decides_is_unstable() -> None:
    """Without the last continuation, which a resample lacks with probability (5/6)^6, the other mask is faster."""
    seconds = np.array([[1.0] * 5 + [9.0], [1.1] * 5 + [1.0], [99.0] * 6])
    found = stability(MASKS, seconds, np.full(6, 2.0), 20, resamples=2000)
    assert found.share == pytest.approx(1 - (5 / 6) ** 6, abs=0.04)
    left = (5 / 6) ** 6
    assert found.overlap == pytest.approx(1 - 2 * left * (1 - left), abs=0.04)


def test_only_studies_that_differ_in_their_seed_are_compared(tmp_path: Path) -> None:
    def choose(study: str, seed: int, mask: str, sampler: str = "tpe") -> object:
        settings = {"seed": seed, "sampler": sampler}
        return seed_stability(tmp_path / study, settings, SkipMask.parse(mask, 10), 20)

    assert choose("a", 0, "layers:1-4") is None
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "choice.json").touch()  # by a loss of power
    assert choose("other", 1, "layers:6-9", "random") is None
    found = choose("b", 1, "layers:1-2,5-6")
    assert found.seeds == 2 and found.overlap == pytest.approx(4 / 12)
    assert found.chance == pytest.approx(0.26, abs=0.04)
    assert choose("c", 2, "layers:1-4").seeds == 3
    choose("z", 2, "layers:7-9")  # another study with the same seed
    found = choose("c", 2, "layers:1-4")
    assert found.seeds == 3 and found.overlap == pytest.approx((1 + 4 / 12 + 4 / 12) / 3)

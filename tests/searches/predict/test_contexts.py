"""Costs are timed where the prompts are, and every continuation is predicted with the costs of its own context."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerskip import Sampling, SkipMask, StopRule, Target
from layerskip.costs.cost_model import CostProfile
from layerskip.scan.replay import Counts
from layerskip.texts.continuations import Continuation
from searches.predict import preparation
from searches.predict.preparation import Preparation
from searches.predict.scan_predictor import ContextCosts, spread_contexts

MASK = SkipMask.parse("layers:0", 2)


def _continuation(length: int) -> Continuation:
    return Continuation("", "", (5,) * (length - 32), (5,) * 64, 64)


def _profile(context: int) -> CostProfile:
    """Attention and verification have a fixed cost and one per position."""
    each = context / 1000
    verify = tuple(4.0 + 3 * each + drafted for drafted in range(4))
    return CostProfile(context, 1.0, 0.5, (0.2 + each, 0.2 + each), (1.0, 1.0), 0.1, 0.25, verify)


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


def test_a_speedup_sums_over_the_contexts_of_the_continuations() -> None:
    continuations = [_continuation(length) for length in (1000, 2500, 4000)]
    parts = [Counts(20, 40, 30, 50, (0, 0, 20)), Counts(30, 90, 5, 35, (0, 0, 0, 30)), Counts(10, 10, 8, 18, (0, 10))]
    costs = ContextCosts(replace(_profile(1000), others=(_profile(4000),)), continuations)

    def seconds(profile: CostProfile, counts: Counts) -> float:
        return profile.seconds(counts, MASK, StopRule())

    drafting = plain = 0.0
    for context, counts in zip((1000, 2500, 4000), parts, strict=True):
        drafting += counts.drafted * (1.0 + 0.5 + 1.0 + 0.2 + context / 1000) + counts.rounds * 0.25
        drafting += sum(times * (4.0 + 3 * context / 1000 + g) for g, times in enumerate(counts.verified))
        plain += counts.tokens * (4.0 + 3 * context / 1000)
    assert costs.speedup(parts, seconds) == pytest.approx(plain / drafting)
    total = sum(parts, Counts())
    one = ContextCosts(_profile(1000), continuations)
    assert one.speedup(parts, seconds) == _profile(1000).speedup(total, MASK, StopRule())
    assert one.average is one.profile


def test_a_profile_is_measured_at_the_contexts_of_the_prompts(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[int] = []

    def measured(target: Target, context: int, *_: Any, **options: Any) -> CostProfile:
        timed.append(context)
        return _profile(context)

    monkeypatch.setattr(preparation, "profile_costs", measured)

    def profile(*lengths: int) -> CostProfile:
        return Preparation(tiny_target, Sampling(), tmp_path).cost_profile([_continuation(each) for each in lengths], 3)

    for _ in range(2):
        assert profile(200, 300) == _profile(256)
        assert profile(192, 1984, 8000) == replace(_profile(192), others=(_profile(1984), _profile(8000)))
    assert timed == [256, 192, 1984, 8000]  # the second time, all are read from their files
    stored = [json.loads(file.read_text(encoding="utf-8"))["asked"] for file in (tmp_path / "profiles").glob("*.json")]
    assert sorted(asked["contexts"] for asked in stored) == [[192, 1984, 8000], [256]]

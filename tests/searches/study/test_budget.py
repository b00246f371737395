"""Shares of a search's seconds."""

from __future__ import annotations

import math
import time

import optuna
import pytest

from searches.study.budget import FINALS, OPENING, PREDICTIONS, TRIALS, Budget, left_out


def test_what_a_stage_leaves_unspent_belongs_to_the_next() -> None:
    budget = Budget(optuna.create_study(), 100.0, time.monotonic())
    lefts = [budget.left(stage) for stage in (OPENING, PREDICTIONS, TRIALS, FINALS)]
    assert lefts == sorted(lefts)
    assert lefts[0] == pytest.approx(25, abs=1)
    assert not any(budget.is_over(stage) for stage in (OPENING, PREDICTIONS, TRIALS, FINALS))
    budget = Budget(optuna.create_study(), 100.0, time.monotonic() - 50)
    assert [budget.is_over(stage) for stage in (OPENING, PREDICTIONS, TRIALS, FINALS)] == [True, True, False, False]
    assert math.isinf(Budget(optuna.create_study(), None, time.monotonic() - 50).left(OPENING))


def test_a_resumed_study_has_the_seconds_that_are_left() -> None:
    study = optuna.create_study()
    Budget(study, 100.0, time.monotonic() - 30).save()
    resumed = Budget(study, 100.0, time.monotonic() - 10)  # has run for ten seconds
    assert resumed.spent == pytest.approx(40, abs=1)
    resumed.save()
    assert Budget(study, 200.0, time.monotonic()).spent == pytest.approx(40, abs=1)


def test_what_is_left_out_is_said_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    study = optuna.create_study()
    budget = Budget(study, 1.0, time.monotonic())
    budget.leave_out(TRIALS, "5 of 32 ran in the budget")
    assert capsys.readouterr().out == "trials: 5 of 32 ran in the budget\n"
    assert left_out(study) == ["Trials: 5 of 32 ran in the budget."]
    budget.begin(TRIALS)  # of a later run, which may have more time
    assert left_out(study) == []

"""One trial passes through few files, and the leaderboard reads it once."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from optuna.trial import FrozenTrial

import layerskip
from searches.study.leaderboard import Leaderboard, leading
from searches.study.study import StudySettings, run_trials
from tests.searches.known import Known, lookup, new_study, objective_of

ROOT = Path(layerskip.__file__).parents[1]
MAX_FILES, MAX_CROSSINGS = 25, 60


class _Trace:
    """The file of each entered function of the project, in order; comprehensions belong to their function."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        mine = file.startswith((f"{ROOT}/layerskip/", f"{ROOT}/searches/"))
        if event == "call" and mine and not name.startswith("<") and not _is_of_the_bench(frame):
            self.files.append(file)


def _is_of_the_bench(frame: FrameType) -> bool:
    caller = frame.f_back
    return caller is not None and caller.f_code.co_filename.endswith("known.py")


def test_a_trial_passes_through_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = lookup(4), lookup(6), lookup(8)
    bench = Known(dict(zip(configs, (1.6, 1.62, 1.63), strict=True)))  # each gets more prompts, as it is level
    study, objective = new_study(*configs), objective_of(bench, on_prompt=lambda: None)
    trace, pooled, genuine = _Trace(), list[int](), Leaderboard._pool

    def pool(board: Leaderboard, trial: FrozenTrial) -> None:
        pooled.append(trial.number)
        genuine(board, trial)

    def on_trial(trial: FrozenTrial) -> None:
        leading(study)  # as for the export and for the progress
        sys.setprofile(trace if trial.number == 1 else None)

    monkeypatch.setattr(Leaderboard, "_pool", pool)
    before = sys.getprofile()
    try:
        run_trials(study, objective, StudySettings(n_trials=3), on_trial)
    finally:
        sys.setprofile(before)
    assert pooled == [0, 1, 2]
    crossings = sum(one != other for one, other in itertools.pairwise(trace.files))
    assert 10 < len(set(trace.files)) <= MAX_FILES
    assert 20 < crossings <= MAX_CROSSINGS

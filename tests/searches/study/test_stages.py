"""A study that is killed in any stage resumes and repeats nothing that was finished."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from searches.study.budget import FITS, recorded_seconds
from searches.train.bridge_store import BRIDGES_FOLDER
from tests.exhaustive import representative
from tests.searches.programs import fork, journal_study, quick, tracked

pytestmark = pytest.mark.system

STAGES = ("continuations", "profile", "scan", "trials", "verdict")


def _study(log: Path, stage: str, piece: int, *overrides: str) -> tuple[int, list[str]]:
    """Run a study that may be killed; return its exit code and the log of its work."""
    done = fork("tests.searches.mortal", str(log), stage, str(piece), *overrides, cwd=log.parent)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, log.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("stage", representative(["scan", "trials"], ["continuations", "profile", "verdict"]))
def test_a_study_killed_in_a_stage_repeats_nothing_finished(stage: str, tiny_folder: Path, tmp_path: Path) -> None:
    small = ("scan.prompts=3", "scan.profile_repeats=2", "scan.proposals.screened=8", "scan.proposals.scanned=2")
    more = (
        "space.methods=[none,layer_skip]",
        "study.n_trials=4",
        "study.name=mortal",
        "measure.held_out_prompts=4",
    )
    overrides = quick(tiny_folder, tracked(tmp_path), *small, *more)
    died, before = _study(tmp_path / "first.log", stage, 1 if stage == "profile" else 3, *overrides)
    assert died == -signal.SIGKILL
    *finished, killed = before
    assert killed.startswith(stage)
    ended, after = _study(tmp_path / "second.log", stage, 0, *overrides)
    assert ended == 0
    assert not set(finished) & set(after)
    assert stage == "trials" or killed in after
    assert {line.split()[0] for line in before + after} == set(STAGES)
    assert [line.split()[0] for line in finished + after if line.startswith("continuations")] == ["continuations"] * 3
    # Trial numbers are never reused, so the number of begun trials shows that none was repeated.
    assert sum(line.startswith("trials") for line in before + after) == 4 + (stage == "trials")
    assert sum(trial.state.is_finished() for trial in journal_study(tmp_path, "mortal").trials) >= 4
    assert (tmp_path / "mortal" / "best.json").exists()


@pytest.mark.parametrize(("stage", "piece"), representative([("training", 3)], [("fits", 2)]))
def test_a_study_killed_while_fitting_or_training_bridges_repeats_nothing_finished(
    stage: str, piece: int, tiny_folder: Path, tmp_path: Path
) -> None:
    small = ("scan.prompts=2", "scan.profile_repeats=2", "scan.proposals.screened=6", "scan.proposals.scanned=2")
    bridged = ("space=bridged", "space.draft_heads=[0]", "bridging.tokens=200", "bridging.max_new_tokens=16")
    trained = ("bridging.batch=8", "bridging.train_seconds=1", "bridging.train_width=4", "scan.proposals.enqueued=1")
    more = ("study.n_trials=6", "study.name=mortal", "measure.held_out_prompts=2", "space.ranges.layer_skip.siblings=[0,0]")
    overrides = quick(tiny_folder, tracked(tmp_path), *small, *bridged, *trained, *more)
    died, before = _study(tmp_path / "first.log", stage, piece, *overrides)
    assert died == -signal.SIGKILL
    *finished, killed = before
    assert killed.startswith(stage)
    ended, after = _study(tmp_path / "second.log", stage, 0, *overrides)
    assert ended == 0
    assert not set(finished) & set(after)
    assert killed in after
    steps = [line for line in finished + after if line.startswith("training")]
    assert steps == [f"training step {number}" for number in range(len(steps))]
    assert len(steps) >= piece
    done = [line for line in finished + after if line.startswith("fits")]
    assert len(done) == len(set(done)) >= 2
    # Fits before the kill count as seconds of the search.
    seconds = {}
    for path in tmp_path.glob(f"{BRIDGES_FOLDER}/*/*/head.json"):
        about = json.loads(path.read_text(encoding="utf-8"))
        seconds[path.parent.name] = about["training"]["seconds"]
    assert len(seconds) == len(done)
    assert recorded_seconds(journal_study(tmp_path, "mortal"), FITS) == seconds

"""A study that is killed in any stage resumes and repeats nothing that was finished."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from searches.bridges.store import BRIDGES_FOLDER
from searches.study.budget import FITS, recorded_seconds
from tests.exhaustive import representative
from tests.searches.programs import fork, quick, stored_study, tracked

pytestmark = pytest.mark.system

STAGES = ("continuations", "profile", "scan", "trials", "verdict")
SMALL = ("study.name=mortal",)


def _killed_and_resumed(stage: str, piece: int, folder: Path, *overrides: str) -> tuple[list[str], str, list[str]]:
    """Kill a study in a piece of work and run it again; return the work before, the killed piece and the work after."""
    found = []
    for name, dies_at, code in (("first", piece, -signal.SIGKILL), ("second", 0, 0)):
        log = folder / f"{name}.log"
        done = fork("tests.searches.mortal", str(log), stage, str(dies_at), *overrides, *SMALL, cwd=folder)
        assert done.returncode == code, done.stderr
        found.append(log.read_text(encoding="utf-8").splitlines())
    (*finished, killed), after = found
    assert killed.startswith(stage)
    assert not set(finished) & set(after)
    return finished, killed, after


@pytest.mark.parametrize("stage", representative(["scan", "trials"], ["continuations", "profile", "verdict"]))
def test_a_study_killed_in_a_stage_repeats_nothing_finished(stage: str, tiny_folder: Path, tmp_path: Path) -> None:
    small = "scan.prompts=3", "scan.proposals.screened=8", "measure.held_out_prompts=4", "scan.proposals.scanned=2"
    overrides = quick(tiny_folder, tracked(tmp_path), *small, "space.methods=[none,layer_skip]", "study.n_trials=4")
    finished, killed, after = _killed_and_resumed(stage, 1 if stage == "profile" else 3, tmp_path, *overrides)
    assert stage == "trials" or killed in after
    work = [line.split()[0] for line in (*finished, killed, *after)]
    assert set(work) == set(STAGES)
    assert work.count("continuations") == 3 + (stage == "continuations")
    # Trial numbers are never reused, so the number of begun trials shows that none was repeated.
    assert work.count("trials") == 4 + (stage == "trials")
    assert sum(trial.state.is_finished() for trial in stored_study(tmp_path, "mortal").trials) >= 4
    assert (tmp_path / "mortal" / "best.json").exists()


@pytest.mark.parametrize(("stage", "piece"), representative([("training", 3)], [("fits", 2)]))
def test_a_study_killed_while_fitting_or_training_bridges_repeats_nothing_finished(
    stage: str, piece: int, tiny_folder: Path, tmp_path: Path
) -> None:
    small = "scan.prompts=2", "scan.proposals.screened=6", "scan.proposals.scanned=2", "measure.held_out_prompts=2"
    bridged = "space=bridged", "space.draft_heads=[0]", "bridging.tokens=200", "bridging.max_new_tokens=16"
    trained = "bridging.batch=8", "bridging.train_seconds=1", "bridging.train_width=4", "scan.proposals.enqueued=1"
    chains = "space.ranges.layer_skip.siblings=[0,0]", "study.n_trials=6"
    overrides = quick(tiny_folder, tracked(tmp_path), *small, *bridged, *trained, *chains)
    finished, killed, after = _killed_and_resumed(stage, piece, tmp_path, *overrides)
    assert killed in after
    steps = [line for line in finished + after if line.startswith("training")]
    assert steps == [f"training step {number}" for number in range(len(steps))]
    assert len(steps) >= piece
    done = [line for line in finished + after if line.startswith("fits")]
    assert len(done) == len(set(done)) >= 2
    # Fits before the kill count as seconds of the search.
    abouts = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob(f"{BRIDGES_FOLDER}/*/*/head.json")}
    seconds = {name: about["training"]["seconds"] for name, about in abouts.items()}
    assert len(seconds) == len(done)
    assert recorded_seconds(stored_study(tmp_path, "mortal"), FITS) == seconds

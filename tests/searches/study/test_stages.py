"""A study that is killed in any stage resumes and repeats nothing that was finished."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.exhaustive import representative
from tests.searches.programs import fork, quick, stored_study, tracked

pytestmark = pytest.mark.system

STAGES = ("continuations", "profile", "scan", "trials", "verdict")


@pytest.mark.parametrize("stage", representative(["scan", "trials"], ["continuations", "profile", "verdict"]))
def test_a_study_killed_in_a_stage_repeats_nothing_finished(stage: str, tiny_folder: Path, tmp_path: Path) -> None:
    small = "scan.prompts=3", "scan.proposals.screened=8", "measure.held_out_prompts=4", "scan.proposals.scanned=2"
    study = "study.name=mortal", "study.n_trials=4", "space.methods=[none,layer_skip]"
    overrides, work_of = quick(tiny_folder, tracked(tmp_path), *small, *study), []
    for name, dies_at, code in (("first", 1 if stage == "profile" else 3, -signal.SIGKILL), ("second", 0, 0)):
        log = tmp_path / f"{name}.log"
        done = fork("tests.searches.mortal", str(log), stage, str(dies_at), *overrides, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        work_of.append(log.read_text(encoding="utf-8").splitlines())
    (*finished, killed), after = work_of
    assert killed.startswith(stage) and not set(finished) & set(after)
    assert stage == "trials" or killed in after
    work = [line.split()[0] for line in (*finished, killed, *after)]
    assert set(work) == set(STAGES)
    assert work.count("continuations") == 3 + (stage == "continuations")
    # Trial numbers are never reused, so the number of begun trials shows that none was repeated.
    assert work.count("trials") == 4 + (stage == "trials")
    assert sum(trial.state.is_finished() for trial in stored_study(tmp_path, "mortal").trials) >= 4
    assert (tmp_path / "mortal" / "best.json").exists()

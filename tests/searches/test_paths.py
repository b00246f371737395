"""Folders and names with any characters: programs take them as they are typed, and write nowhere else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.searches.conftest import Launch
from tests.searches.programs import execute, quick

pytestmark = pytest.mark.system


def test_a_study_stays_in_a_folder_of_any_name_also_after_it_was_moved(
    tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    typed = tmp_path / "q?x 50%20 [é]'y,=+#"
    few = "scan=none", "space.methods=[none,prompt_lookup]", "study.name=it's, a=b"
    for trials, folder in ((1, typed), (2, tmp_path / "50%25?")):
        if trials == 2:
            typed.rename(folder)
        done = execute("layerskip", *quick(tiny_folder, folder, *few, f"study.n_trials={trials}"), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert os.listdir(tmp_path) == [folder.name]
        assert {"mlflow.db", "mlartifacts", "it's, a=b"} <= set(os.listdir(folder))
    best = folder / "it's, a=b" / "best.json"
    assert json.loads(best.read_text(encoding="utf-8"))["search"]["trials"] == 2
    assert len(list((folder / "mlartifacts").glob("*/artifacts/best.json"))) == 1
    done = launch("export", str(best), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("name", "reason"), [("x" * 300, "File name too long"), ("a\x1b[31m", "cannot be printed")])
def test_names_that_no_folder_can_have_are_refused_before_anything_is_written(
    name: str, reason: str, tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    done = launch("layerskip", *quick(tiny_folder, tmp_path / "outputs", f"study.name={name}"), cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: study.name: ")
    assert reason in done.stderr
    assert not os.listdir(tmp_path)

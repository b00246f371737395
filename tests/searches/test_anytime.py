"""Studies that have an answer early: provisional exports, budgets that end, and what killed studies measure again."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from layerskip import Export
from searches.workers.slots import FINISHED
from tests.searches.conftest import Launch
from tests.searches.programs import Fork, journal_study, kill_study, quick, tracked

pytestmark = pytest.mark.system

CHEAP = "space.methods=[none,prompt_lookup,token_recycling,cascade]"


def _search(folder: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((folder / "best.json").read_text(encoding="utf-8"))["search"]
    return fields


def test_an_interrupted_study_leaves_a_provisional_export_that_its_end_confirms(
    tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    folder = tracked(tmp_path / "outputs") / "it"
    overrides = quick(tiny_folder, folder.parent, "study.name=it", CHEAP, "study.n_trials=200")
    with Fork("searches.layerskip", *overrides, cwd=tmp_path) as process:
        while process.running and not (folder / "best.json").exists():
            time.sleep(0.02)
        process.send(signal.SIGINT)
        assert process.wait(60).returncode == 130
    assert _search(folder)["provisional"] is True
    config = Export.load(folder / "best.json").config
    assert config.method in ("none", "prompt_lookup", "token_recycling", "cascade")
    done = len(journal_study(folder.parent, "it").trials)
    ended = launch("layerskip", *overrides[:-1], f"study.n_trials={done}", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "provisional" not in _search(folder)
    more = launch("layerskip", *overrides[:-1], f"study.n_trials={done + 1}", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert f"wrote {folder / 'best.json'}, provisional" not in more.stdout  # a confirmed one stays until the next finals


def test_a_budget_that_is_spent_ends_with_a_confirmed_export_and_what_was_left_out(
    tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    folder = tracked(tmp_path / "outputs") / "it"
    overrides = quick(
        tiny_folder, folder.parent, "study.name=it", "study.n_trials=200", "study.max_seconds=0.1", "scan.prompts=2"
    )
    ended = launch("layerskip", *overrides, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    study = journal_study(folder.parent, "it")
    assert [trial.user_attrs["config"]["method"] for trial in study.trials] == [
        "prompt_lookup",
        "token_recycling",
        "cascade",
    ]
    assert "provisional" not in _search(folder)
    lines = ended.stdout.splitlines()
    assert any(line.startswith("machine: ") for line in lines)
    assert "trials: 3 of 200 ran in the budget" in lines
    assert sum("trial 1, token recycling" in line and "0 s left" in line for line in lines) == 1
    report = (folder / "report.md").read_text(encoding="utf-8")
    assert "Trials: 3 of 200 ran in the budget." in report
    assert "Predictions: its share of the budget ended" in report
    before = (folder / "journal.log").read_bytes()
    again = launch("layerskip", *overrides, cwd=tmp_path)  # nothing is left, so nothing is measured
    assert again.returncode == 0, again.stderr
    assert len(journal_study(folder.parent, "it").trials) == 3
    assert (folder / "journal.log").read_bytes().startswith(before)


def test_a_killed_study_measures_nothing_twice(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    folder, moment = tracked(tmp_path / "outputs") / "it", random.Random(0)
    overrides = quick(tiny_folder, folder.parent, "study.name=it", CHEAP, "study.n_trials=6", "measure.held_out_prompts=6")
    killed = [kill_study(*overrides, cwd=tmp_path, seconds=moment.uniform(0.0, 0.6)) for _ in range(3)]
    assert any(killed)
    ended = launch("layerskip", *overrides, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for pattern in ("first-*.jsonl", "finals-*.jsonl"):
        (log,) = folder.glob(pattern)
        names = Counter(json.loads(line)[0] for line in log.read_text(encoding="utf-8").splitlines())
        assert set(names.values()) == {1}
    # A kill between a measurement and the end of its trial leaves a failed one; its retry reads the log.
    done = [trial for trial in journal_study(folder.parent, "it").trials if trial.state in FINISHED]
    whole = [trial for trial in done if "measurement" in trial.user_attrs]
    assert Counter(str(trial.user_attrs["config"]) for trial in whole[:3]).most_common(1)[0][1] == 1  # the arms
    assert "provisional" not in _search(folder)

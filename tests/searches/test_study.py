"""Real studies on a tiny model: extended, killed, interrupted, out of time, in folders of any name."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import layerskip
from searches.study.leaderboard import FINISHED
from tests.accelerator import DEVICE
from tests.searches.conftest import Launch
from tests.searches.programs import Fork, execute, kill_study, quick, runs, sqlite, stored_study, tracked
from tests.searches.report.pages import metrics_of

pytestmark = pytest.mark.system

CHEAP = "space.methods=[none,prompt_lookup,token_recycling,cascade]"  # nothing to scan, hence no profile


def _check_complete(outputs: Path, name: str, trials: int) -> None:
    """Check the number of finished trials, and that each has exactly one run."""
    finished = [t for t in stored_study(outputs, name).trials if t.state in FINISHED]
    assert len(finished) == trials
    numbers = [int(run.data.tags["trial_number"]) for run in runs(sqlite(outputs), "trial")]
    assert sorted(numbers) == sorted(t.number for t in finished)
    (study,) = runs(sqlite(outputs), "study")
    assert study.info.status == "FINISHED"
    assert {run.data.tags["mlflow.parentRunId"] for run in runs(sqlite(outputs), "trial")} == {study.info.run_id}


def _search(folder: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((folder / "best.json").read_text(encoding="utf-8"))["search"]
    return fields


def test_a_study_leaves_trials_runs_report_and_export(finished_study: Path, tiny_folder: Path) -> None:
    _check_complete(finished_study, "one", 5)
    folder = finished_study / "one"
    export = json.loads((folder / "best.json").read_text(encoding="utf-8"))
    assert export["schema"] == "layerskip.export/2"
    assert export["search"]["trials"] == 5
    assert export["search"]["mlflow_run_id"] == runs(sqlite(finished_study), "study")[0].info.run_id
    assert {"speedup", "speedup_low", "speedup_high", "tokens_per_second", "losslessness"} <= export["evidence"].keys()
    assert export["evidence"]["max_new_tokens"] == 8
    assert (folder / "report.png").stat().st_size > 10_000
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "5 of 5 trials finished" in page
    measured = [trial.number for trial in stored_study(finished_study, "one").trials if "measurement" in trial.user_attrs]
    drawn = [trace["x"] for trace in metrics_of(page)["history"]["data"] if trace["mode"] == "markers"]
    assert sorted(itertools.chain(*drawn)) == measured
    target = layerskip.load_target(str(tiny_folder), dtype="float32", device=DEVICE)
    loaded = layerskip.Export.load(folder / "best.json", target)
    expected = layerskip.generate(target, "a prompt", max_new_tokens=12).tokens
    assert layerskip.generate(target, "a prompt", loaded.config, max_new_tokens=12).tokens == expected


def test_the_run_of_the_study_tells_its_environment_its_verdict_and_the_winning_run(finished_study: Path) -> None:
    (study,) = runs(sqlite(finished_study), "study")
    assert {"prompts_digest", "device", "versions", "git_commit"} <= study.data.tags.keys()
    assert study.data.tags["mlflow.note.content"] in (finished_study / "one" / "report.md").read_text(encoding="utf-8")
    (best,) = [run for run in runs(sqlite(finished_study), "trial") if run.data.tags.get("best") == "true"]
    assert best.data.tags["config"] == study.data.tags["winner"]
    assert best.data.params["measure.max_new_tokens"] == "8"
    for run in (study, best):  # what MLflow shows as source and dataset
        assert run.data.tags["mlflow.source.name"] == "python -m searches.layerskip"
        assert run.data.tags["mlflow.source.git.commit"] == study.data.tags["git_commit"]
        (used,) = run.inputs.dataset_inputs
        assert used.dataset.digest == study.data.tags["prompts_digest"][:36] and used.dataset.name


def test_another_process_decodes_with_the_registered_winner(finished_study: Path, tiny_folder: Path) -> None:
    program = "import mlflow; print(mlflow.pyfunc.load_model('models:/one@best').predict(['a prompt']))"
    variables = os.environ | {"MLFLOW_TRACKING_URI": sqlite(finished_study)}
    loaded = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    target = layerskip.load_target(str(tiny_folder), dtype="float32", device="cpu")
    expected = layerskip.generate(target, "a prompt", max_new_tokens=256)
    assert loaded.stdout.splitlines()[-1] == str([expected.text])


def test_a_finished_study_is_not_run_again_and_more_trials_extend_it(
    finished_study: Path, tiny_folder: Path, launch: Launch
) -> None:
    before = stored_study(finished_study, "one").trials
    overrides = quick(tiny_folder, finished_study, "study.name=one")
    for trials in (5, 7):
        again = launch("layerskip", *overrides, f"study.n_trials={trials}", cwd=finished_study.parent)
        assert again.returncode == 0, again.stderr
        assert stored_study(finished_study, "one").trials[: len(before)] == before
        _check_complete(finished_study, "one", trials)
    refused = launch(
        "layerskip", *overrides, "study.n_trials=9", "sampling.repetition_penalty=1.5", cwd=finished_study.parent
    )
    assert refused.returncode == 2
    assert "sampling.repetition_penalty" in refused.stderr


def test_a_study_killed_at_any_moment_is_finished_by_the_same_command(
    tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    outputs = tmp_path / "outputs"
    overrides = quick(tiny_folder, tracked(outputs), "study.n_trials=9", "study.name=killed")
    moment = random.Random(5)
    killed = [kill_study(*overrides, cwd=tmp_path, seconds=moment.uniform(0.05, 0.8)) for _ in range(10)]
    assert sum(killed) >= 3
    result = launch("layerskip", *overrides, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    _check_complete(outputs, "killed", 9)
    for pattern in ("first-*.jsonl", "finals-*.jsonl"):  # nothing is measured twice
        (log,) = (outputs / "killed").glob(pattern)
        names = Counter(json.loads(line)[0] for line in log.read_text(encoding="utf-8").splitlines())
        assert {*names.values()} == {1}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_study_leaves_a_provisional_export_that_its_end_confirms(
    number: signal.Signals, tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    folder = tracked(tmp_path / "outputs") / "it"
    overrides = quick(tiny_folder, folder.parent, "study.name=it", CHEAP)
    with Fork("searches.layerskip", *overrides, "study.n_trials=200", cwd=tmp_path) as process:
        process.wait_for_trials()
        while process.running and not (folder / "best.json").exists():
            time.sleep(0.02)
        while process.running and len(runs(sqlite(folder.parent), "trial")) < 2:
            time.sleep(0.3)
        process.send(number)
        ended = process.wait(timeout=60)
    assert ended.returncode == 128 + number, ended.stderr
    assert "Best trials" in ended.stdout
    assert "Traceback" not in ended.stderr
    assert runs(sqlite(folder.parent), "study")[0].info.status == "KILLED"
    page = folder / "report.html"
    assert '<span class="badge interrupted">' in page.read_text(encoding="utf-8")
    assert _search(folder)["provisional"] is True
    layerskip.Export.load(folder / "best.json")
    finished = len([t for t in stored_study(folder.parent, "it").trials if t.state in FINISHED])
    for trials in (finished, finished + 1):
        result = launch("layerskip", *overrides, f"study.n_trials={trials}", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert "provisional" not in _search(folder)
        _check_complete(folder.parent, "it", trials)
    assert f"wrote {folder / 'best.json'}, provisional" not in result.stdout  # a confirmed one stays until the next finals
    assert '<span class="badge finished">' in page.read_text(encoding="utf-8")


def test_a_study_in_a_database_without_lookups_exports_before_its_trials_with_the_threads_that_are_set(
    tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    outputs = tracked(tmp_path / "outputs")
    storage = f"study.storage=sqlite:///{tmp_path}/studies.db"
    few = "study.name=it", "study.n_trials=2", "study.threads=1", "space.methods=[none,layer_skip]", storage
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        result = launch("layerskip", *quick(tiny_folder, outputs, *few), cwd=tmp_path)
    finally:
        torch.set_num_threads(before)
    assert result.returncode == 0, result.stderr
    written, _, rest = result.stdout.partition("provisional until the finals")
    assert "threads: 1)" in written
    assert "trial 0" not in written and "trial 0" in rest


def test_a_budget_that_is_spent_ends_with_a_confirmed_export_and_what_was_left_out(
    tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    folder = tracked(tmp_path / "outputs") / "it"
    spent = "study.n_trials=200", "study.max_seconds=0.1", "scan.prompts=2"
    overrides = quick(tiny_folder, folder.parent, "study.name=it", *spent)
    ended = launch("layerskip", *overrides, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    tried = [trial.user_attrs["config"]["method"] for trial in stored_study(folder.parent, "it").trials]
    assert tried == ["prompt_lookup", "token_recycling", "cascade"]
    assert "provisional" not in _search(folder)
    lines = ended.stdout.splitlines()
    assert any(line.startswith("machine: ") for line in lines)
    assert "trials: 3 of 200 ran in the budget" in lines
    assert sum("trial 1, token recycling" in line and "0 s left" in line for line in lines) == 1
    report = (folder / "report.md").read_text(encoding="utf-8")
    assert "Trials: 3 of 200 ran in the budget." in report
    assert "Predictions: its share of the budget ended" in report
    before = stored_study(folder.parent, "it").trials
    again = launch("layerskip", *overrides, cwd=tmp_path)  # nothing is left, so nothing is measured
    assert again.returncode == 0, again.stderr
    assert stored_study(folder.parent, "it").trials == before


def test_trials_end_once_another_one_would_cost_more_than_it_saves(
    tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    folder = tracked(tmp_path / "outputs") / "it"
    few = "space.methods=[none,prompt_lookup]", "study.n_trials=200", "study.expected_tokens=1", "study.name=it"
    ended = launch("layerskip", *quick(tiny_folder, folder.parent, *few), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("trials: "))
    trials = len(stored_study(folder.parent, "it").trials)
    assert line.startswith(f"trials: {trials} of 200 ran until another one was expected to take ")
    assert line.endswith(" s, and to save 0.0 s of 1 tokens") and trials < 50
    assert line.removeprefix("trials: ") in (folder / "report.md").read_text(encoding="utf-8")


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
    assert _search(best.parent)["trials"] == 2
    assert len(list((folder / "mlartifacts").glob("*/artifacts/best.json"))) == 1
    done = launch("export", str(best), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")

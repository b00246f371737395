"""Bad input ends with one line that names the field and exit code 2, and writes nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from searches import benchmark, layerskip
from searches.app.application import run
from tests.disk import fill
from tests.searches.programs import Fork, execute, fork, quick, sqlite, tracked


def _end(program: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a program in this process, check for exit code 2, and return its stderr."""
    task = {"layerskip": layerskip.search, "benchmark": benchmark.benchmark}[program]
    monkeypatch.setattr(sys, "argv", [program, *overrides])
    with pytest.raises(SystemExit) as end:
        run(program, task)
    stderr = capsys.readouterr().err
    assert end.value.code == 2, stderr
    return stderr


def test_ctrl_c_in_a_finaliser_ends_the_program(tmp_path: Path) -> None:
    program = """
import signal, time
from searches.app.application import run

class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def task(config):
    Dying()
    print("dropped", flush=True)
    time.sleep(60)

run("datastore", task)
"""
    (tmp_path / "dying.py").write_text(program, encoding="utf-8")
    ended = fork("dying.py", cwd=tmp_path, timeout=50)
    assert ended.returncode == 130, ended.stderr
    assert ended.stdout == "dropped\n"
    assert ended.stderr == "interrupted; the same command continues from here\n"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["target=nonesuch"], "target/nonesuch"),
        (["target.path=/there/is/none"], "target.path"),
        (["target.dtype=float8"], "dtype"),
        (["target.device=abacus"], "device"),
        (["target.colour=red"], "target.colour"),
        (["space.masks=[layers:99]"], "space.masks"),
        (["space.skip_length=[5,2]"], "space.skip_length"),
        (["space.drafts=[/there/is/none]"], "draft: "),
        (["space.cross_drafts=[/there/is/none]"], "draft: "),
        (["space.eagle_heads=[/there/is/none]"], "head: "),
        (["space.bridges=linear"], "space.bridges"),
        (["space=bridged", "space.ranks=[9999]"], "space.ranks"),
        (["space=bridged", "space.ranks=8"], "space.ranks"),
        (["space=bridged", "space.draft_heads=[2]"], "space.draft_heads"),
        (["sampling.temperature=-1"], "temperature"),
        (["sampling.top_p=2"], "top_p"),
        (["study.n_trials=0"], "study.n_trials"),
        (["study.name=a/b"], "study.name"),
        (["seed=x"], "seed"),
        (["study.storage=postgresql://127.0.0.1:1/none"], "study.storage"),
        (["study.storage=nonesuch://x"], "study.storage"),
        (["tracking.uri=http://127.0.0.1:1"], "tracking.uri"),
        (["prompts=jsonl", "prompts.path=/there/is/none.jsonl"], "prompts.path"),
        (["prompts=jsonl", "prompts.path=5"], "prompts.path"),
        (["target.trust_remote_code=no"], "trust_remote_code"),
        (["study.max_seconds=-1"], "study.max_seconds"),
        (["pruner.p_threshold=2"], "pruner: "),
        (["sampler=nsga2", "sampler.population_size=1"], "sampler: "),
    ],
)
def test_a_search_refuses_bad_input(
    overrides: list[str],
    named: str,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    outputs = tmp_path / "outputs"
    stderr = _end("layerskip", [*quick(tiny_folder, outputs), *overrides], monkeypatch, capsys)
    assert stderr.startswith("error: ")
    assert named in stderr
    assert stderr.count("\n") == 1
    assert not outputs.exists()


@pytest.mark.parametrize(
    ("override", "named"),
    [("outputs=null", "outputs"), ("outputs=file", "outputs"), ("outputs=file/deep", "outputs"), ("record=.", "record")],
)
def test_paths_that_cannot_be_written_are_refused_before_measuring(
    override: str,
    named: str,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    stderr = _end("benchmark", ["target=local", f"target.path={tiny_folder}", override], monkeypatch, capsys)
    assert stderr.startswith(f"error: {named}: ")
    assert stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("content", [b"SQLite format 3\0and more", b"notes\nof mine"])
def test_a_file_that_is_not_a_journal_is_not_changed(
    content: bytes, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "studies.db"
    file.write_bytes(content)
    stderr = _end("layerskip", [*quick(tiny_folder, tmp_path / "outputs"), f"study.storage={file}"], monkeypatch, capsys)
    assert stderr.startswith(f"error: study.storage: {file} is no Optuna journal")
    assert file.read_bytes() == content


def test_a_deleted_experiment_is_named(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = tracked(tmp_path / "outputs")
    client = MlflowClient(sqlite(outputs))
    client.delete_experiment(client.create_experiment("gone"))
    overrides = [*quick(tiny_folder, outputs), "tracking.experiment=gone"]
    stderr = _end("layerskip", overrides, monkeypatch, capsys)
    assert stderr.startswith("error: tracking.experiment: gone was deleted")


def test_a_bad_prompt_is_reported_with_its_line_number(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": ""}\n', encoding="utf-8")
    overrides = [*quick(tiny_folder, tmp_path / "outputs"), "prompts=jsonl", f"prompts.path={prompts}"]
    stderr = _end("layerskip", overrides, monkeypatch, capsys)
    assert "mine.jsonl, line 2" in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "named"),
    [("{", "JSON"), ('{"schema": "other/1"}', "schema"), ('{"schema": "layerskip.export/1", "config": {}}', "target")],
)
def test_a_benchmark_refuses_a_foreign_export(
    content: str,
    named: str,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    export = tmp_path / "best.json"
    export.write_text(content, encoding="utf-8")
    outputs = tmp_path / "outputs"
    overrides = [
        "target=local",
        f"target.path={tiny_folder}",
        f"config={export}",
        f"outputs={outputs}",
    ]
    stderr = _end("benchmark", overrides, monkeypatch, capsys)
    assert named in stderr
    assert stderr.count("\n") == 1
    assert not outputs.exists()


def test_a_full_disk_is_refused_before_writing(
    small_disk: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(small_disk, leave=100_000)
    outputs = small_disk / "outputs"
    stderr = _end("layerskip", list(quick(tiny_folder, outputs)), monkeypatch, capsys)
    assert stderr.startswith("error: outputs")
    assert not outputs.exists()


def test_a_disk_that_fills_up_ends_with_one_line_and_the_study_resumes(small_disk: Path, tiny_folder: Path) -> None:
    outputs = small_disk / "outputs"
    overrides = quick(tiny_folder, tracked(outputs), "study.n_trials=40", "study.name=filling")
    with Fork("searches.layerskip", *overrides, cwd=small_disk) as process:
        assert "0 of 40 trials" in process.wait_for_trials()
        fill(small_disk, leave=0)
        ended = process.wait(timeout=200)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.strip().splitlines()[-1].startswith("error: outputs")
    (small_disk / "ballast").unlink()
    fewer = [override for override in overrides if not override.startswith("study.n_trials")]
    again = execute("layerskip", *fewer, "study.n_trials=6", cwd=small_disk)
    assert again.returncode == 0, again.stderr
    assert (outputs / "filling" / "best.json").exists()

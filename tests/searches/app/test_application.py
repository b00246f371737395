"""Bad input, parts that do not fit a target, and errors of a file system end with one line and exit code 2."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from layerskip import load_target
from layerskip.drafters.datastore import Datastore
from layerskip.heads.eagle import KIND, EagleHead, EagleShape
from layerskip.models.trained_module import save_trained
from searches.app.application import explain
from searches.app.checks import InputError
from tests.accelerator import DEVICE
from tests.disk import fill
from tests.searches.conftest import Launch
from tests.searches.programs import QUICK, Fork, execute, fork, quick, sqlite, tracked
from tests.tiny import save_tiny


def _refused(done: subprocess.CompletedProcess[str]) -> str:
    """Check that a program ended with exit code 2 and one line; return the line."""
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr


def test_ctrl_c_in_a_finaliser_ends_the_program(tmp_path: Path) -> None:
    program = """
import signal, time
from searches.app.application import run
from searches.benchmark.program import benchmark

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
        (["space.ranges.layer_skip.num_speculative_tokens=[5,2]"], "space.ranges.layer_skip.num_speculative_tokens"),
        (["space.ranges.draft_model.draft_model=[/there/is/none]"], "draft_model: "),
        (["space.ranges.cross_tokenizer.draft_model=[/there/is/none]"], "draft_model: "),
        (["space.ranges.eagle.head=[/there/is/none]"], "head: "),
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
    overrides: list[str], named: str, tiny_folder: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    outputs = tmp_path / "outputs"
    assert named in _refused(launch("layerskip", *quick(tiny_folder, outputs), *overrides, cwd=tmp_path))
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
    launch: Launch,
) -> None:
    (tmp_path / "file").touch()
    done = launch("benchmark", "target=local", f"target.path={tiny_folder}", override, cwd=tmp_path)
    assert _refused(done).startswith(f"error: {named}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("content", [b"SQLite format 3\0and more", b"notes\nof mine"])
def test_a_file_that_is_not_a_journal_is_not_changed(
    content: bytes, tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    file = tmp_path / "studies.db"
    file.write_bytes(content)
    done = launch("layerskip", *quick(tiny_folder, tmp_path / "outputs"), f"study.storage={file}", cwd=tmp_path)
    assert _refused(done).startswith(f"error: study.storage: {file} is no Optuna journal")
    assert file.read_bytes() == content


def test_a_deleted_experiment_is_named(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    outputs = tracked(tmp_path / "outputs")
    client = MlflowClient(sqlite(outputs))
    client.delete_experiment(client.create_experiment("gone"))
    done = launch("layerskip", *quick(tiny_folder, outputs), "tracking.experiment=gone", cwd=tmp_path)
    assert _refused(done).startswith("error: tracking.experiment: gone was deleted")


def test_a_bad_prompt_is_reported_with_its_line_number(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": ""}\n', encoding="utf-8")
    which = ("prompts=jsonl", f"prompts.path={prompts}")
    done = launch("layerskip", *quick(tiny_folder, tmp_path / "outputs"), *which, cwd=tmp_path)
    assert "mine.jsonl, line 2" in _refused(done)


@pytest.mark.parametrize(
    ("content", "named"),
    [("{", "JSON"), ('{"schema": "other/1"}', "schema"), ('{"schema": "layerskip.export/1", "config": {}}', "target")],
)
def test_a_benchmark_refuses_a_foreign_export(
    content: str,
    named: str,
    tiny_folder: Path,
    tmp_path: Path,
    launch: Launch,
) -> None:
    export = tmp_path / "best.json"
    export.write_text(content, encoding="utf-8")
    outputs = tmp_path / "outputs"
    which = ("target=local", f"target.path={tiny_folder}", f"config={export}", f"outputs={outputs}")
    assert named in _refused(launch("benchmark", *which, cwd=tmp_path))
    assert not outputs.exists()


def test_a_full_disk_is_refused_before_writing(small_disk: Path, tiny_folder: Path, launch: Launch) -> None:
    fill(small_disk, leave=100_000)
    outputs = small_disk / "outputs"
    done = launch("layerskip", *quick(tiny_folder, outputs), cwd=small_disk)
    assert _refused(done).startswith("error: outputs")
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


def _error(path: Path, mode: str = "w") -> OSError:
    with pytest.raises(OSError, match="Errno") as raised, path.open(mode, buffering=1) as file:
        file.write("line\n")
    return raised.value


def test_a_full_standard_output_is_not_blamed_on_the_outputs_folder() -> None:
    line = explain(_error(Path("/dev/full")))
    assert line == f"a file or the standard output cannot be written: {os.strerror(28)}"


def test_a_folder_that_became_read_only_is_named(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert explain(_error(small_disk / "file")) == f"outputs: cannot write {small_disk}/file: Read-only file system"


def test_a_folder_of_another_user_is_named(tmp_path: Path) -> None:
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "lock"))
    assert explain(error) == f"outputs: cannot write {tmp_path}/lock: Permission denied"


def test_the_text_of_others_does_not_control_the_terminal() -> None:
    line = explain(InputError("prompts: \x1b]0;title\x07 is refused"))
    assert line == r"prompts: \x1b]0;title\x07 is refused"


def test_a_missing_file_is_a_defect(tmp_path: Path) -> None:
    assert explain(_error(tmp_path / "file", "r")) is None


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("could not create a primitive")], ids=str)
def test_memory_that_does_not_suffice_is_one_line(error: Exception) -> None:
    line = explain(error)
    assert line is not None
    assert line.startswith("memory: does not suffice")


def _foreign_head(folder: Path) -> Path:
    other = load_target(str(save_tiny(folder / "other", seed=5)), dtype="float32", device=DEVICE)
    head = EagleHead(EagleShape.of(other))
    save_trained(folder / "head", KIND, head.shape.to_dict(), head.weights(), other, {})
    return folder / "head"


def _damaged_store(folder: Path) -> Path:
    target = load_target(str(save_tiny(folder / "target")), dtype="float32", device=DEVICE)
    Datastore.build([[5, 6, 7, 8]], target).save(folder / "store")
    tokens = folder / "store" / "tokens.npy"
    tokens.write_bytes(tokens.read_bytes()[:-4])
    return folder / "store"


@pytest.mark.parametrize(
    ("make", "method", "field", "message"),
    [
        (_foreign_head, "eagle", "head", "made for another target"),
        (_damaged_store, "retrieval", "datastore", "cannot read"),
    ],
)
@pytest.mark.parametrize("program", ["layerskip", "benchmark"])
def test_a_part_that_does_not_fit_the_target_is_refused_in_one_line(
    program: str,
    make: Callable[[Path], Path],
    method: str,
    field: str,
    message: str,
    tiny_folder: Path,
    tmp_path: Path,
    launch: Launch,
) -> None:
    part = make(tmp_path)
    common = [f"target.path={tiny_folder}", f"outputs={tmp_path / 'outputs'}"]
    if program == "layerskip":
        overrides = [*QUICK, *common, f"space.methods=[none,{method}]", f"space.ranges.{method}.{field}=[{part}]"]
    else:
        no_draft = ["contenders.draft_model=null", "peers.transformers_assistant=null"]
        overrides = [*QUICK[:3], *common, "measure.prompts=2", *no_draft, f"contenders.{method}.{field}={part}"]
    line = _refused(launch(program, *overrides, cwd=tmp_path))
    assert line.startswith(f"error: {field}: ") and message in line
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("contenders.layer_skip=false", "contenders.layer_skip: False is not a configuration; null leaves the row out"),
        (
            "+peers.transformers_prompt_lookup.prompt_lookup_min=2",
            "peers.transformers_prompt_lookup.prompt_lookup_min: is not one of ",
        ),
    ],
)
def test_impossible_rows_of_a_benchmark_are_refused_in_one_line(
    override: str, message: str, tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    done = launch("benchmark", "target=local", f"target.path={tiny_folder}", override, cwd=tmp_path)
    assert _refused(done).startswith(f"error: {message}")

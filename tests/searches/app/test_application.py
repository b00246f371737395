"""Bad input, parts that do not fit a target, and errors of a file system end with one line and exit code 2."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from layerskip import load_target
from layerskip.drafters.retrieval import Datastore
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.models.trained_module import save_trained
from searches.app.application import explain
from searches.app.checks import InputError
from tests.accelerator import DEVICE
from tests.resources import fill
from tests.searches.conftest import Launch
from tests.searches.programs import QUICK, Fork, execute, fork, quick, tracked
from tests.tiny import save_tiny


def _refused(done: subprocess.CompletedProcess[str]) -> str:
    """Check that a program ended with exit code 2 and one line; return the line."""
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["target=nonesuch"], "target/nonesuch"),
        (["target.path=/there/is/none"], "target.path"),
        (["target.dtype=float8"], "dtype"),
        (["target.colour=red"], "target.colour"),
        (["space.masks=[layers:99]"], "space.masks"),
        (["space.ranges.draft_model.draft_model=[/there/is/none]"], "draft_model: "),
        (["study.n_trials=0"], "study.n_trials"),
        (["seed=x"], "seed"),
        (["study.storage=postgresql://127.0.0.1:1/none"], "study.storage"),
        (["tracking.uri=http://127.0.0.1:1"], "tracking.uri"),
        (["prompts=jsonl", "prompts.path=/there/is/none.jsonl"], "prompts.path"),
        (["pruner.p_threshold=2"], "pruner: "),
    ],
)
def test_a_search_refuses_bad_input(
    overrides: list[str], named: str, tiny_folder: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    outputs = tmp_path / "outputs"
    assert named in _refused(launch("layerskip", *quick(tiny_folder, outputs), *overrides, cwd=tmp_path))
    assert not outputs.exists()


def test_a_full_disk_is_refused_before_writing(small_disk: Path, tiny_folder: Path, launch: Launch) -> None:
    fill(small_disk, leave=100_000)
    outputs = small_disk / "outputs"
    assert _refused(launch("layerskip", *quick(tiny_folder, outputs), cwd=small_disk)).startswith("error: outputs")
    assert not outputs.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_finaliser_ends_the_program(number: signal.Signals, tmp_path: Path) -> None:
    program = f"""
import signal, time
from searches.app.application import run

class Dying:
    def __del__(self):
        signal.raise_signal({number:d})

def task(config):
    Dying()
    print("dropped", flush=True)
    time.sleep(60)

run("datastore", task)
"""
    (tmp_path / "dying.py").write_text(program, encoding="utf-8")
    ended = fork("dying.py", cwd=tmp_path, timeout=50)
    assert (ended.returncode, ended.stdout) == (128 + number, "dropped\n"), ended.stderr
    assert ended.stderr == "interrupted; the same command continues from here\n"


@pytest.mark.system
def test_a_disk_that_fills_up_ends_with_one_line_and_the_study_resumes(small_disk: Path, tiny_folder: Path) -> None:
    outputs = small_disk / "outputs"
    overrides = quick(tiny_folder, tracked(outputs), "study.n_trials=40", "study.name=filling")
    with Fork("searches.layerskip", *overrides, cwd=small_disk) as process:
        assert "0 of 40 trials" in process.wait_for_trials()
        fill(small_disk, leave=0)
        ended = process.wait(timeout=200)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.strip().splitlines()[-1].startswith("error: cannot write ")
    (small_disk / "ballast").unlink()
    fewer = [override for override in overrides if not override.startswith("study.n_trials")]
    again = execute("layerskip", *fewer, "study.n_trials=6", cwd=small_disk)
    assert again.returncode == 0, again.stderr
    assert (outputs / "filling" / "best.json").exists()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "x"), "a file or the standard output cannot be written: No space left on device"),
        (OSError(30, "x", "there/file"), "cannot write there/file: Read-only file system"),
        (PermissionError(13, "x", "there/lock"), "cannot write there/lock: Permission denied"),
        (InputError("prompts: \x1b]0;title\x07 is refused"), r"prompts: \x1b]0;title\x07 is refused"),
        (MemoryError(), "memory: does not suffice, even for plain decoding: none is left"),
        (
            RuntimeError("could not create a primitive"),
            "memory: does not suffice, even for plain decoding: could not create a primitive",
        ),
        (FileNotFoundError(2, "x", "there/file"), None),  # a defect
    ],
)
def test_an_error_that_the_user_can_fix_is_one_line(error: Exception, line: str | None) -> None:
    assert explain(error) == line


def _foreign_head(folder: Path) -> Path:
    other = load_target(str(save_tiny(folder / "other", seed=5)), dtype="float32", device=DEVICE)
    head = EagleHead(EagleShape.of(other))
    save_trained(folder / "head", head.shape.to_dict(), head.weights(), other, {})
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
def test_a_part_that_does_not_fit_the_target_is_refused_in_one_line(
    make: Callable[[Path], Path], method: str, field: str, message: str, tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    part, outputs = make(tmp_path), tmp_path / "outputs"
    no_draft = ("contenders.draft_model=null", "peers.transformers_assistant=null", f"contenders.{method}.{field}={part}")
    commands = {
        "layerskip": (*QUICK, f"space.methods=[none,{method}]", f"space.ranges.{method}.{field}=[{part}]"),
        "benchmark": (*QUICK[:3], "measure.prompts=2", *no_draft),
    }
    for program, overrides in commands.items():
        line = _refused(launch(program, *overrides, f"target.path={tiny_folder}", f"outputs={outputs}", cwd=tmp_path))
        assert line.startswith(f"error: {field}: ") and message in line
        assert not outputs.exists()

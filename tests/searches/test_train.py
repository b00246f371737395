"""Training heads: the result drafts, a killed training resumes, and bad input is refused."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from layerskip import SpeculativeConfig, generate, load_target
from layerskip.files import digest
from searches.training.trainer import HeadTrainer
from tests.accelerator import DEVICE
from tests.resources import fill
from tests.searches.conftest import Launch
from tests.searches.programs import Fork, runs, sqlite, tracked
from tests.tiny import save_tiny

pytestmark = pytest.mark.system

SMALL = (
    *("tokens=400", "max_new_tokens=24", "batch=8", "texts_per_step=4", "learning_rate=0.003", "vocabulary=64"),
    *("held_out_tokens=8", "target=local", "target.dtype=float32", "target.device=cpu", "prompts=jsonl"),
)
Train = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tiny model, with a file of a few prompts."""
    return _with_prompts(save_tiny(tmp_path_factory.mktemp("model")))


def _with_prompts(folder: Path) -> Path:
    (folder / "few.jsonl").write_text("".join(f'{{"prompt": "Say {number}."}}\n' for number in range(4)), encoding="utf-8")
    return folder


def _overrides(model: Path, outputs: Path, *more: str) -> tuple[str, ...]:
    """Return the overrides of a training that writes the folder ``h``."""
    if not (outputs / "mlflow.db").exists():
        tracked(outputs)
    where = (f"target.path={model}", f"prompts.path={model}/few.jsonl", f"head={outputs}/h", f"outputs={outputs}")
    return (*SMALL, *where, "steps=60", *more)


@pytest.fixture
def train(model: Path, tmp_path: Path, launch: Launch) -> Train:
    """Runs the program with some outputs, the temporary folder by default."""

    def run(*more: str, outputs: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        return launch("train", *_overrides(model, outputs, *more), cwd=tmp_path)

    return run


def _trained(folder: Path) -> dict[str, Any]:
    about: dict[str, Any] = json.loads((folder / "head.json").read_text(encoding="utf-8"))
    return about


def _check_drafts(model: Path, **fields: Any) -> None:
    """Check that a configuration drafts, and that the output is that of plain decoding."""
    target = load_target(str(model), dtype="float32", device=DEVICE)
    config = SpeculativeConfig.from_dict({"num_speculative_tokens": 2} | fields)
    plain = generate(target, "Tell me more.", SpeculativeConfig(), max_new_tokens=24)
    made = generate(target, "Tell me more.", config, max_new_tokens=24)
    assert made.tokens == plain.tokens
    assert made.stats.drafted > 0


def _check_refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last


def test_a_head_is_trained_and_drafts(model: Path, tmp_path: Path, train: Train) -> None:
    done = train()
    assert done.returncode == 0, done.stderr
    about = _trained(tmp_path / "h")
    assert about["training"]["steps_done"] == 60
    assert about["training"]["positions"] >= 400
    assert about["training"]["spared"] == []  # too few texts
    (texts,) = (tmp_path / "texts").glob("*.jsonl")
    written = [json.loads(line)[1] for line in texts.read_text().splitlines()]
    assert about["training"]["data"] == digest([tokens for tokens, *_ in written])
    assert about["training"]["texts_seconds"] == sum(seconds for *_, seconds in written) > 0
    assert about["target"]["architecture"] == "LlamaForCausalLM"
    assert about["shape"]["vocabulary"] == 64
    assert about["shape"]["lookback"] == 2
    weights = (tmp_path / "h" / "head.safetensors").read_bytes()
    _check_drafts(model, method="eagle", head=str(tmp_path / "h"))
    (run,) = runs(sqlite(tmp_path), "training")
    assert run.info.status == "FINISHED"
    assert {"loss", "held_out_acceptance_at_01", "held_out_acceptance_at_03"} <= set(run.data.metrics)
    assert train().returncode == 0
    assert _trained(tmp_path / "h")["training"] == about["training"]
    assert (tmp_path / "h" / "head.safetensors").read_bytes() == weights


def test_validation_texts_are_not_trained_on(tmp_path: Path, train: Train) -> None:
    (tmp_path / "served.jsonl").write_text('{"prompt": "Tell a long story of somebody."}\n', encoding="utf-8")
    overrides = ("tokens=700", "steps=20", f"begin_like={tmp_path}/served.jsonl")
    done = train(*overrides, f"head={tmp_path}/one")
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "texts").glob("*.jsonl")
    *others, last = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(others) >= 20  # fewer texts have no validation text
    _, (tokens, begin, _) = last
    last[1][0] = tokens[:begin] + tokens[begin:][::-1]  # the same frequencies in another order
    file.write_text("".join(json.dumps(row) + "\n" for row in [*others, last]))
    shutil.rmtree(tmp_path / "features")
    assert train(*overrides, f"head={tmp_path}/two").returncode == 0
    one, two = (load_file(tmp_path / name / "head.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    records = [_trained(tmp_path / name)["training"] for name in ("one", "two")]
    assert records[0]["held_out"] == records[1]["held_out"]
    assert len(records[0]["spared"]) == 3


def test_a_killed_training_resumes(model: Path, tmp_path: Path, train: Train) -> None:
    outputs = tmp_path / "killed"
    state = outputs / "h" / "training.pt"
    with Fork("searches.train", *_overrides(model, outputs, "save_seconds=0.001"), cwd=tmp_path) as process:
        deadline = time.monotonic() + 120
        while process.running and time.monotonic() < deadline:
            if state.exists() and torch.load(state, weights_only=True)["step"]:  # the first checkpoint has step 0
                break
            time.sleep(0.02)
        process.send(signal.SIGKILL)
        assert process.wait().returncode == -signal.SIGKILL
    before = torch.load(state, weights_only=True)["step"]
    assert 0 < before < 60
    assert not (outputs / "h" / "head.json").exists()
    done = train("save_seconds=0.001", outputs=outputs)
    assert done.returncode == 0, done.stderr
    assert _trained(outputs / "h")["training"]["steps_done"] == 60
    (run,) = runs(sqlite(outputs), "training")
    steps = [metric.step for metric in MlflowClient(sqlite(outputs)).get_metric_history(run.info.run_id, "loss")]
    assert len(steps) == len(set(steps))  # no step was repeated
    assert set(range(1, 61)) - {before} <= set(steps)
    assert train("save_seconds=0.001").returncode == 0
    whole = load_file(tmp_path / "h" / "head.safetensors")
    for name, tensor in load_file(outputs / "h" / "head.safetensors").items():
        assert torch.allclose(tensor, whole[name], rtol=1e-4, atol=1e-6), name


def test_two_programs_share_one_training(model: Path, tmp_path: Path) -> None:
    """Both programs end with the same head, and every step was done once."""
    arguments = ("searches.train", *_overrides(model, tmp_path))
    with Fork(*arguments, cwd=tmp_path) as one, Fork(*arguments, cwd=tmp_path) as other:
        ended = [process.wait() for process in (one, other)]
    assert [done.returncode for done in ended] == [0, 0], ended
    (run,) = runs(sqlite(tmp_path), "training")
    steps = [metric.step for metric in MlflowClient(sqlite(tmp_path)).get_metric_history(run.info.run_id, "loss")]
    assert len(steps) == len(set(steps))


def test_a_disk_that_fills_up_ends_with_one_line_and_the_training_resumes(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, train: Train
) -> None:
    """torch reports no reason if it cannot write."""
    save, saved = HeadTrainer.save, []

    def save_on_a_full_disk(self: HeadTrainer) -> None:
        if len(saved) == 2:
            fill(small_disk, leave=50_000)
        saved.append(self.step)
        save(self)

    few = ("save_seconds=0.001", "feature_bytes=1000000")
    monkeypatch.setattr(HeadTrainer, "save", save_on_a_full_disk)
    done = train(*few, outputs=small_disk)
    file = small_disk / "h" / "training.pt"
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"error: cannot write {file}: No space left on device\n"
    assert [path.name for path in file.parent.iterdir()] == ["training.pt"]
    assert torch.load(file, weights_only=True)["step"] == saved[1]
    (small_disk / "ballast").unlink()
    monkeypatch.setattr(HeadTrainer, "save", save)
    done = train(*few, outputs=small_disk)
    assert done.returncode == 0, done.stderr
    assert _trained(small_disk / "h")["training"]["steps_done"] == 60


def test_the_disk_must_have_room_for_hidden_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: Train) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9, 0, 64 * 2**20))
    _check_refused(train("feature_bytes=1000000"), "error: feature_bytes: 1,000,000 do not fit")
    assert not (tmp_path / "texts").exists()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("steps=0", "steps"),
        ("learning_rate=2.0", "learning_rate"),
        ("begin_like=nothing.jsonl", "begin_like"),
        ("vocabulary=2", "vocabulary"),  # padding, start and end are always in the vocabulary
        ("max_seconds=0", "max_seconds"),
        ("head=@/few.jsonl", "head"),
        ("lookback=65", "lookback"),
        ("feature_bytes=10", "feature_bytes"),
    ],
)
def test_bad_input_ends_with_one_line(override: str, named: str, model: Path, tmp_path: Path, train: Train) -> None:
    _check_refused(train(*override.replace("@", str(model)).split()), f"error: {named}: ")
    assert (tmp_path / "texts").exists() == (named == "feature_bytes")  # a budget is checked against texts

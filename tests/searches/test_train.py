"""Training a head: the result drafts, a killed training resumes, and bad input is refused."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file

from layerskip import SpeculativeConfig, generate, load_target
from layerskip.files import digest
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.models.trained_module import save_trained
from searches.training.trainer import Trainer, disk_bytes
from tests.accelerator import DEVICE
from tests.disk import fill
from tests.searches.conftest import Launch
from tests.searches.programs import Fork, runs, sqlite, tracked
from tests.tiny import save_tiny

pytestmark = pytest.mark.system

SMALL = (
    *("tokens=400", "max_new_tokens=24", "batch=8", "texts_per_step=4", "learning_rate=0.003", "vocabulary=64"),
    *("held_out_tokens=8", "target=local", "target.dtype=float32", "target.device=cpu"),
)
BUDGET = "bytes=10"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tiny model, with a file of a few prompts."""
    folder = save_tiny(tmp_path_factory.mktemp("model"))
    (folder / "few.jsonl").write_text("".join(f'{{"prompt": "Say {number}."}}\n' for number in range(4)), encoding="utf-8")
    return folder


@pytest.mark.parametrize(("kind", "three_layers"), [("eagle", False), ("eagle", True), ("medusa", False)])
def test_a_head_is_trained_and_drafts(kind: str, three_layers: bool, model: Path, tmp_path: Path, launch: Launch) -> None:
    few = ("prompts=jsonl", f"prompts.path={model}/few.jsonl", "steps=60", f"head={tmp_path}/h")
    which = (f"drafter={kind}", *(("three_layers=true", "lookback=0") if three_layers else ()))
    overrides = (*SMALL, f"target.path={model}", f"outputs={tracked(tmp_path)}", *which, *few)
    done = launch("train", *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    about = json.loads((tmp_path / "h" / "head.json").read_text())
    assert about["training"]["steps_done"] == 60
    assert about["training"]["positions"] >= 400
    assert about["training"]["spared"] == []  # too few texts
    (texts,) = (tmp_path / "texts").glob("*.jsonl")
    written = [json.loads(line)[1] for line in texts.read_text().splitlines()]
    assert about["training"]["data"] == digest([tokens for tokens, *_ in written])
    assert about["training"]["texts_seconds"] == sum(seconds for *_, seconds in written) > 0
    assert about["target"]["architecture"] == "LlamaForCausalLM"
    assert about["shape"]["vocabulary"] == 64
    assert len(about["shape"].get("modules", "1")) == (3 if three_layers else 1)
    assert about["shape"].get("lookback", 0) == (2 if kind == "eagle" and not three_layers else 0)
    assert about["shape"].get("side_by_side", False) == three_layers
    weights = (tmp_path / "h" / "head.safetensors").read_bytes()
    target = load_target(str(model), dtype="float32", device=DEVICE)
    config = SpeculativeConfig.from_dict({"method": kind, "head": str(tmp_path / "h"), "num_speculative_tokens": 2})
    plain = generate(target, "Tell me more.", SpeculativeConfig(), max_new_tokens=24)
    made = generate(target, "Tell me more.", config, max_new_tokens=24)
    assert made.tokens == plain.tokens
    assert made.stats.drafted > 0
    (run,) = runs(sqlite(tmp_path), "training")
    assert run.info.status == "FINISHED"
    assert {"loss", "held_out_acceptance_at_01", "held_out_acceptance_at_03"} <= set(run.data.metrics)
    again = launch("train", *overrides, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "h" / "head.json").read_text())["training"] == about["training"]
    assert (tmp_path / "h" / "head.safetensors").read_bytes() == weights


def test_validation_texts_are_not_trained_on(model: Path, tmp_path: Path, launch: Launch) -> None:
    (tmp_path / "served.jsonl").write_text('{"prompt": "Tell a long story of somebody."}\n', encoding="utf-8")
    asked = ("tokens=700", "steps=20", "prompts=jsonl", f"prompts.path={model}/few.jsonl", f"outputs={tracked(tmp_path)}")
    overrides = (*SMALL, f"target.path={model}", *asked, f"begin_like={tmp_path}/served.jsonl")
    done = launch("train", *overrides, f"head={tmp_path}/one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "texts").glob("*.jsonl")
    *others, last = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(others) >= 20  # fewer texts have no validation text
    _, (tokens, begin, _) = last
    last[1][0] = tokens[:begin] + tokens[begin:][::-1]  # the same frequencies in another order
    file.write_text("".join(json.dumps(row) + "\n" for row in [*others, last]))
    shutil.rmtree(tmp_path / "features")
    assert launch("train", *overrides, f"head={tmp_path}/two", cwd=tmp_path).returncode == 0
    one, two = (load_file(tmp_path / name / "head.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    records = [json.loads((tmp_path / name / "head.json").read_text())["training"] for name in ("one", "two")]
    assert records[0]["held_out"] == records[1]["held_out"]
    assert len(records[0]["spared"]) == 3


def test_a_head_of_another_origin_is_not_overwritten(model: Path, tmp_path: Path, launch: Launch) -> None:
    target = load_target(str(model), dtype="float32", device=DEVICE)
    head = EagleHead(EagleShape.of(target))
    save_trained(tmp_path / "theirs", "eagle", head.shape.to_dict(), head.weights(), target, {})
    done = launch(
        "train", *SMALL, f"target.path={model}", f"outputs={tracked(tmp_path)}", f"head={tmp_path}/theirs", cwd=tmp_path
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: head: ") and "name another folder" in done.stderr
    assert not (tmp_path / "texts").exists()


def test_a_killed_training_resumes(model: Path, tmp_path: Path, launch: Launch) -> None:
    few = ("prompts=jsonl", f"prompts.path={model}/few.jsonl")
    overrides = (*SMALL, f"target.path={model}", *few, "steps=60", "save_seconds=0.001")
    killed = [*overrides, f"outputs={tracked(tmp_path / 'killed')}", f"head={tmp_path / 'killed' / 'h'}"]
    state = tmp_path / "killed" / "h" / "training.pt"
    with Fork("searches.train", *killed, cwd=tmp_path) as process:
        deadline = time.monotonic() + 120
        while process.running and time.monotonic() < deadline:
            if state.exists() and torch.load(state, weights_only=True)["step"]:  # the first checkpoint has step 0
                break
            time.sleep(0.02)
        process.send(signal.SIGKILL)
        assert process.wait().returncode == -signal.SIGKILL
    before = torch.load(state, weights_only=True)["step"]
    assert 0 < before < 60
    assert not (tmp_path / "killed" / "h" / "head.json").exists()
    done = launch("train", *killed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    training = json.loads((tmp_path / "killed" / "h" / "head.json").read_text())["training"]
    assert training["steps_done"] == 60
    (run,) = runs(sqlite(tmp_path / "killed"), "training")
    logged = MlflowClient(sqlite(tmp_path / "killed")).get_metric_history(run.info.run_id, "loss")
    steps = sorted(metric.step for metric in logged)
    assert len(steps) == len(set(steps))  # no step was repeated
    assert set(range(1, 61)) - {before} <= set(steps)
    assert (
        launch("train", *overrides, f"outputs={tracked(tmp_path)}", f"head={tmp_path / 'h'}", cwd=tmp_path).returncode == 0
    )
    whole = load_file(tmp_path / "h" / "head.safetensors")
    for name, tensor in load_file(tmp_path / "killed" / "h" / "head.safetensors").items():
        assert torch.allclose(tensor, whole[name], rtol=1e-4, atol=1e-6), name
    written = (tmp_path / "killed" / "texts").stat().st_mtime_ns
    more = launch("train", *killed, "tokens=5000", cwd=tmp_path)  # refused before texts are written
    assert (more.returncode, more.stderr.count("\n")) == (2, 1), more.stderr
    assert "holds another training" in more.stderr
    assert (tmp_path / "killed" / "texts").stat().st_mtime_ns == written
    (texts,) = (tmp_path / "killed" / "texts").glob("*.jsonl")
    first, *others = texts.read_text(encoding="utf-8").splitlines()
    name, (tokens, *about) = json.loads(first)
    texts.write_text("\n".join([json.dumps([name, [tokens[::-1], *about]]), *others, ""]), encoding="utf-8")
    shutil.rmtree(tmp_path / "killed" / "features")
    state_before = state.read_bytes()
    again = launch("train", *killed, cwd=tmp_path)
    assert again.returncode == 2, again.stderr
    assert "or one of other texts" in again.stderr
    assert state.read_bytes() == state_before


def test_two_programs_share_one_training(model: Path, tmp_path: Path) -> None:
    """Both programs end with the same head, and every step was done once."""
    few = ("prompts=jsonl", f"prompts.path={model}/few.jsonl", "steps=60", f"head={tmp_path}/h")
    overrides = (*SMALL, f"target.path={model}", f"outputs={tracked(tmp_path)}", *few)
    arguments = ("searches.train", *overrides)
    with Fork(*arguments, cwd=tmp_path) as one, Fork(*arguments, cwd=tmp_path) as other:
        ended = [process.wait() for process in (one, other)]
    assert [done.returncode for done in ended] == [0, 0], ended
    (run,) = runs(sqlite(tmp_path), "training")
    steps = [metric.step for metric in MlflowClient(sqlite(tmp_path)).get_metric_history(run.info.run_id, "loss")]
    assert len(steps) == len(set(steps))


def test_a_disk_that_fills_up_ends_with_one_line_and_the_training_resumes(
    model: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, launch: Launch
) -> None:
    """torch reports no reason if it cannot write."""
    save, saved = Trainer.save, []

    def save_on_a_full_disk(self: Trainer) -> None:
        if len(saved) == 2:
            fill(small_disk, leave=50_000)
        saved.append(self.step)
        save(self)

    few = ("prompts=jsonl", f"prompts.path={model}/few.jsonl", "steps=60", "save_seconds=0.001", "feature_bytes=1000000")
    overrides = (*SMALL, f"target.path={model}", f"outputs={tracked(small_disk)}", f"head={small_disk}/h", *few)
    monkeypatch.setattr(Trainer, "save", save_on_a_full_disk)
    done = launch("train", *overrides, cwd=small_disk)
    file = small_disk / "h" / "training.pt"
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"error: outputs: cannot write {file}: No space left on device\n"
    assert [path.name for path in file.parent.iterdir()] == ["training.pt"]
    assert torch.load(file, weights_only=True)["step"] == saved[1]
    (small_disk / "ballast").unlink()
    monkeypatch.setattr(Trainer, "save", save)
    done = launch("train", *overrides, cwd=small_disk)
    assert done.returncode == 0, done.stderr
    assert json.loads((small_disk / "h" / "head.json").read_text())["training"]["steps_done"] == 60


def test_the_disk_must_have_room_for_the_training(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: Launch
) -> None:
    """There must be room for two checkpoints and the hidden states."""
    usage, needed = namedtuple("usage", "total used free"), 10**6 + 64 * 2**20
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9, 0, needed))
    few = ("prompts=jsonl", f"prompts.path={model}/few.jsonl", "steps=1")
    overrides = (*SMALL, f"target.path={model}", f"outputs={tracked(tmp_path)}", "feature_bytes=1000000", *few)
    done = launch("train", *overrides, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: feature_bytes: 1,000,000 do not fit")
    head = EagleHead(EagleShape.of(load_target(str(model), dtype="float32", device=DEVICE), vocabulary=64, lookback=2))
    needed += disk_bytes(head)
    done = launch("train", *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("eagle-*")
    written = 2 * (folder / "training.pt").stat().st_size + (folder / "head.safetensors").stat().st_size
    assert (
        0.8 * written < disk_bytes(head) <= written
    )  # without names and shapes, which are small compared with real weights


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("drafter=prompt_lookup", "drafter"),
        ("steps=0", "steps"),
        ("learning_rate=2.0", "learning_rate"),
        ("begin_like=nothing.jsonl", "begin_like"),
        ("vocabulary=x", "vocabulary"),
        ("vocabulary=2", "vocabulary"),  # padding, start and end are always in the vocabulary
        ("max_seconds=0", "max_seconds"),
        ("calibration_bytes=many", "calibration_bytes"),
        ("drafter=layer_skip mask=layers:1 bridge.rank=9999", "bridge.rank"),
        ("drafter=layer_skip mask=layers:1 bridge=linear", "bridge"),
        ("drafter=layer_skip mask=layers:1 warm_start=nothing", "bridge"),
        ("drafter=layer_skip mask=layers:1 held_out_tokens=1", "held_out_tokens"),
        ("drafter=layer_skip mask=layers:1 drafter.bridge=nearby", "drafter.bridge"),
        ("head=@/few.jsonl", "head"),
        ("three_layers=3", "three_layers"),
        ("lookback=65", "lookback"),
        ("feature_bytes=10", "feature_bytes"),
        ("drafter=layer_skip mask=layers:1 calibration_bytes=10", "calibration_bytes"),
        ("drafter=layer_skip mask=layers:1 training_bytes=10", "training_bytes"),
    ],
)
def test_bad_input_ends_with_one_line(override: str, named: str, model: Path, tmp_path: Path, launch: Launch) -> None:
    few = ("prompts=jsonl", f"prompts.path={model}/few.jsonl")
    given = override.replace("@", str(model)).split()
    overrides = (*SMALL, *few, f"target.path={model}", f"outputs={tracked(tmp_path)}", *given)
    done = launch("train", *overrides, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: {named}: ")
    assert "Traceback" not in done.stderr
    assert (tmp_path / "texts").exists() == override.endswith(BUDGET)  # a budget is checked against texts

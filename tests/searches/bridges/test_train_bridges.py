"""Training bridges: the result drafts, an interrupted training logs its closed form, and bad input is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from layerskip import ConfigError, SpeculativeConfig, Target, generate, load_target
from layerskip.bridges.fit import Calibration
from searches.app.checks import InputError
from searches.app.interrupt import INTERRUPTED
from searches.bridges import training
from searches.bridges.training import BridgeTrainer, bridge_shape
from tests.accelerator import DEVICE
from tests.searches.conftest import Launch
from tests.searches.programs import runs, sqlite, tracked
from tests.searches.test_train import SMALL
from tests.tiny import save_tiny

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tiny model, with a file of a few prompts."""
    folder = save_tiny(tmp_path_factory.mktemp("model"))
    (folder / "few.jsonl").write_text("".join(f'{{"prompt": "Say {number}."}}\n' for number in range(4)), encoding="utf-8")
    return folder


def _bridges(model: Path, outputs: Path) -> tuple[str, ...]:
    """Return the overrides of a training that writes the folder ``b``."""
    few = ("prompts=jsonl", f"prompts.path={model}/few.jsonl", "steps=30", f"head={outputs}/b")
    which = ("drafter=layer_skip", "mask=layers:1-2", "bridge.kind=mlp", "bridge.rank=8", "bridge.width=8")
    return (*SMALL, f"target.path={model}", f"outputs={tracked(outputs)}", *which, *few)


@pytest.mark.parametrize("helps", [True, False])
def test_bridges_are_written_and_draft_if_they_beat_empty_skips(
    helps: bool, model: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = training.held_out_acceptance
    # Drafts of a tiny random model are right at random, with or without bridges.
    monkeypatch.setattr(
        training,
        "held_out_acceptance",
        lambda *args: measured(*args) if args[2] is not None else [0.0 if helps else 1.0] * 3,
    )
    overrides = _bridges(model, tmp_path)
    done = launch("train", *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "closed form, " in done.stdout
    assert ("nothing is written" in done.stdout) == (not helps)
    assert (tmp_path / "b" / "head.json").exists() == helps
    if not helps:
        assert not (tmp_path / "b" / "head.safetensors").exists()
        return
    (rate,) = (float(rate) for rate in re.findall(r"trained, .* s: ([\d.]+)", done.stdout))
    about = json.loads((tmp_path / "b" / "head.json").read_text())
    assert about["training"]["steps_done"] == 30
    assert about["training"]["held_out"][0] == pytest.approx(rate, abs=1e-3)
    target = load_target(str(model), dtype="float32", device=DEVICE)
    heads = {"bridge": str(tmp_path / "b"), "draft_head": str(tmp_path / "b" / "draft_head")}
    config = SpeculativeConfig.from_dict({"method": "layer_skip", "mask": "layers:1-2", "num_speculative_tokens": 2} | heads)
    plain = generate(target, "Tell me more.", SpeculativeConfig(), max_new_tokens=24)
    made = generate(target, "Tell me more.", config, max_new_tokens=24)
    assert made.tokens == plain.tokens
    assert made.stats.drafted > 0
    warm = launch("train", *overrides, "mask=layers:1", f"warm_start={tmp_path}/b", f"head={tmp_path}/w", cwd=tmp_path)
    assert warm.returncode == 0, warm.stderr


def test_an_interrupted_training_logs_its_closed_form(
    model: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: BridgeTrainer) -> list[float]:
        raise KeyboardInterrupt

    overrides = _bridges(model, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(BridgeTrainer, "evaluate", interrupted)  # after the fit was saved
        assert launch("train", *overrides, cwd=tmp_path).returncode == INTERRUPTED
    (run,) = runs(sqlite(tmp_path), "training")
    assert "fit_seconds" not in run.data.metrics
    monkeypatch.setattr(Calibration, "fit", None)  # a further fit would fail
    done = launch("train", *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = runs(sqlite(tmp_path), "training")
    assert run.data.metrics["fit_seconds"] > 0
    assert 0 <= run.data.metrics["agreement_closed_form"] <= 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mask": "layers:90"}, "mask"),
        ({"mask": ""}, "mask"),
        ({"bridge": {"kind": "other", "rank": 0, "width": 0}}, "bridge.kind"),
        ({"bridge": {"kind": "linear", "rank": -1, "width": 0}}, "bridge.rank"),
    ],
)
def test_impossible_bridges_are_refused(fields: dict[str, object], named: str, tiny_target: Target) -> None:
    config = {"drafter": {"mask": "layers:1"}, "mask": None, "bridge": {"kind": "mean", "rank": 0, "width": 0}}
    assert bridge_shape(OmegaConf.create(config), tiny_target).mask == "layers:1"
    with pytest.raises((InputError, ConfigError), match=f"^{named}: "):
        bridge_shape(OmegaConf.create(config | fields), tiny_target)


def test_models_that_cannot_be_scanned_are_refused_before_texts_are_written(tmp_path: Path, launch: Launch) -> None:
    folder = save_tiny(tmp_path / "model", "gpt_neo")
    (tmp_path / "few.jsonl").write_text("".join(f'{{"prompt": "Say {number}."}}\n' for number in range(4)), encoding="utf-8")
    which = ("drafter=layer_skip", "mask=layers:1", "prompts=jsonl", f"prompts.path={tmp_path}/few.jsonl")
    done = launch("train", *SMALL, f"target.path={folder}", f"outputs={tmp_path}/outputs", *which, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "cannot be scanned" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "outputs" / "texts").exists()

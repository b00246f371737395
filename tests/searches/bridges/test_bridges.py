"""Tests of ``searches.bridges`` on tiny models: the whole program, resuming, exports and bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient

from layerskip import Export, SpeculativeConfig, generate, load_target
from layerskip.heads.eagle import EagleHead, EagleShape
from layerskip.measure.measurement import Sample
from layerskip.models.trained_module import save_trained
from layerskip.scan.scan import Scanner
from searches.app.application import run
from searches.app.interrupt import INTERRUPTED
from searches.bridges.program import _heads, bridges
from searches.study.bench import ModelBench
from searches.train.bridge_training import BridgeTrainer
from tests.accelerator import DEVICE
from tests.exhaustive import representative
from tests.searches.conftest import Launch
from tests.searches.programs import runs, sqlite, tracked
from tests.tiny import save_tiny

pytestmark = pytest.mark.system

SMALL = (
    *("tokens=1000", "max_new_tokens=16", "batch=8", "texts_per_step=4", "steps=6", "max_seconds=1000", "depth=3"),
    *("masks=[layers:1,layers:1-2]", "vocabularies=[48]", "contenders=1", "trained.width=8", "measure.prompts=4"),
    *(
        "measure.held_out_prompts=2",
        "measure.max_new_tokens=24",
        "target=local",
        "target.dtype=float32",
        "target.device=cpu",
    ),
)


@pytest.mark.parametrize("family", representative(["gemma3_text"], ["llama", "qwen2"]))
def test_bridges_of_any_family_are_compared(family: str, tmp_path: Path, launch: Launch) -> None:
    folder = save_tiny(tmp_path / "model", family)
    few = "".join(f'{{"prompt": "Say {number}."}}\n' for number in range(8))
    (tmp_path / "few.jsonl").write_text(few, encoding="utf-8")
    prompts = ("prompts=jsonl", f"prompts.path={tmp_path}/few.jsonl")
    fitted = ["mean", "linear", *(["mlp"] if family == "llama" else [])]
    which = (*prompts, f"kinds=[{','.join(fitted)}]", f"record={tmp_path}/record.json")
    overrides = (*SMALL, f"target.path={folder}", f"outputs={tracked(tmp_path)}", *which)
    done = launch("bridges", *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    points = record["points"]
    kinds = {(point["mask"], point["bridge"], point["tokens"]) for point in points}
    assert len(points) == len(kinds) == 2 * (2 + len(fitted)) * 2
    assert {point["bridge"] for point in points} == {"empty", *fitted, "trained"}
    assert all(0 <= point["agreement"] <= 1 and point["predicted"] > 0 for point in points)
    assert str(tmp_path) not in json.dumps(record["points"])
    assert {name: record["learning"][name] for name in ("tokens", "texts_per_step")} == {"tokens": 1000, "texts_per_step": 4}
    empty = {point["mask"]: point["agreement"] for point in points if (point["bridge"], point["tokens"]) == ("empty", None)}
    whole = [point for point in points if point["tokens"] is None and point["bridge"] != "empty"]
    assert all(point["fit"]["helps"] == (point["agreement"] > empty[point["mask"]]) for point in whole)
    helped = any(point["fit"]["helps"] for point in whole)
    assert helped or family == "gemma3_text"  # its output has nothing that a bridge could learn
    assert set(record["measured"]) == {"empty 1", *(["bridged 1"] if helped else [])}
    assert {found["losslessness"] for found in record["measured"].values()} == {"exact"}
    short = {point["mask"] for point in record["short_skips"]}
    assert short and not short & set(empty) and all(point["bridge"] == "empty" for point in record["short_skips"])
    predicted = max(p["predicted"] for p in (*points, *record["short_skips"]) if p["bridge"] == "empty")
    assert record["measured"]["empty 1"]["predicted"] == predicted
    fits = [point["fit"] for point in whole]
    assert all(fit["wall_seconds"] >= fit["seconds"] and fit["scan_seconds"] > 0 for fit in fits)
    assert sum(record["seconds"].values()) > sum(fit["seconds"] for fit in fits)
    (run,) = runs(sqlite(tmp_path), "bridges")
    history = MlflowClient(sqlite(tmp_path)).get_metric_history(run.info.run_id, "agreement_bridged")
    assert sorted(metric.value for metric in history) == pytest.approx(sorted(point["agreement"] for point in whole))
    target = load_target(str(folder), dtype="float32", device=DEVICE)
    (best,) = tmp_path.glob("bridges-*/best.json")
    export = Export.load(best, target)
    assert export.config.method == record["winner"]["method"] == "none"  # two prompts are too few for a winner
    assert "No drafting wins" in done.stdout
    assert export.search["seconds"] == pytest.approx(sum(record["seconds"].values()))
    if not helped:
        assert "drafts no better" in done.stdout
        assert record["over_empty"] is None
        return
    assert record["over_empty"]["empty"] == "empty 1"
    ratio, speed = record["over_empty"]["bridged 1"], {name: f["speedup"] for name, f in record["measured"].items()}
    assert ratio["ratio"] == pytest.approx(speed["bridged 1"] / speed["empty 1"])
    assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
    if family != "llama":
        return
    again = launch("bridges", *overrides, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    resumed = json.loads((tmp_path / "record.json").read_text())
    assert resumed["points"] == points
    for part in ("screening", "continuation", "texts", "profile"):  # cached results count with their original time
        assert resumed["seconds"][part] == record["seconds"][part] > 0
    assert len(MlflowClient(sqlite(tmp_path)).get_metric_history(run.info.run_id, "agreement_bridged")) == len(history)


def test_each_mask_is_trained_from_scratch_and_logged_at_once(
    tiny_folder: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks are compared at equal training time, so none starts from the bridges of another."""
    started: list[str] = []

    class Recording(BridgeTrainer):
        def initialise(self) -> None:
            assert self._warm_start is None
            started.append(self.bridges.shape.mask)
            if len(started) == 3:
                raise KeyboardInterrupt
            super().initialise()

    monkeypatch.setattr("searches.bridges.points.BridgeTrainer", Recording)
    # All bridges help here.
    monkeypatch.setattr("searches.bridges.points.acceptance_rates", lambda scan: [float(scan.bridges is not None)])
    few = "".join(f'{{"prompt": "Say {number}."}}\n' for number in range(8))
    (tmp_path / "few.jsonl").write_text(few, encoding="utf-8")
    which = ("kinds=[]", "masks=[layers:0,layers:1-2,layers:0-1]", "prompts=jsonl", f"prompts.path={tmp_path}/few.jsonl")
    overrides = (*SMALL, f"target.path={tiny_folder}", f"outputs={tracked(tmp_path)}", *which)
    assert launch("bridges", *overrides, cwd=tmp_path).returncode == INTERRUPTED
    (run,) = runs(sqlite(tmp_path), "bridges")
    client = MlflowClient(sqlite(tmp_path))
    assert len(client.get_metric_history(run.info.run_id, "fit_seconds")) == 2
    done = launch("bridges", *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert started == ["layers:0", "layers:1-2", "layers:0-1", "layers:0-1"]
    assert len(client.get_metric_history(run.info.run_id, "fit_seconds")) == 3


def test_a_mask_whose_training_diverges_is_left_out(
    tiny_folder: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bridge in closed form is compared all the same."""

    class Diverging(BridgeTrainer):
        def loss(self, places: list[int]) -> torch.Tensor:
            loss = super().loss(places)
            return loss * float("nan") if self.bridges.shape.mask == "layers:1" else loss

    monkeypatch.setattr("searches.bridges.points.BridgeTrainer", Diverging)
    few = "".join(f'{{"prompt": "Say {number}."}}\n' for number in range(8))
    (tmp_path / "few.jsonl").write_text(few, encoding="utf-8")
    which = ("kinds=[linear]", "prompts=jsonl", f"prompts.path={tmp_path}/few.jsonl", f"record={tmp_path}/record.json")
    done = launch("bridges", *SMALL, f"target.path={tiny_folder}", f"outputs={tracked(tmp_path)}", *which, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trained for layers:1 is left out: learning_rate: the loss is nan" in done.stdout
    points = {(point["mask"], point["bridge"]) for point in json.loads((tmp_path / "record.json").read_text())["points"]}
    assert points == {(mask, kind) for mask in ("layers:1", "layers:1-2") for kind in ("empty", "linear", "trained")} - {
        ("layers:1", "trained")
    }


class _Quick(ModelBench):
    """Real decoding whose bridged drafts take a tenth of their time."""

    def compare(self, configs: Mapping[str, SpeculativeConfig], *args: Any, **kwargs: Any) -> Iterator[dict[str, Sample]]:
        for row in super().compare(configs, *args, **kwargs):
            yield {
                name: replace(sample, decode_seconds=sample.decode_seconds / 10) if name.startswith("bridged") else sample
                for name, sample in row.items()
            }


def test_the_export_of_a_bridged_winner_includes_its_bridges(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = "".join(f'{{"prompt": "Say {number}."}}\n' for number in range(24))
    (tmp_path / "some.jsonl").write_text(some, encoding="utf-8")
    prompts = ("prompts=jsonl", f"prompts.path={tmp_path}/some.jsonl", "measure.held_out_prompts=10", "kinds=[linear]")
    outputs = tracked(tmp_path)
    monkeypatch.setattr("searches.bridges.program.ModelBench", _Quick)
    monkeypatch.setattr(sys, "argv", ["bridges", *SMALL, *prompts, f"outputs={outputs}", f"target.path={tiny_folder}"])
    with pytest.raises(SystemExit) as end:
        run("bridges", bridges)
    assert not end.value.code
    assert " wins: " in capsys.readouterr().out
    record = json.loads((outputs / "bridges.json").read_text())
    assert record["winner"]["bridge"] in {point["config"].get("bridge") for point in record["points"]}
    (folder,) = outputs.glob("bridges-*")
    folder.rename(tmp_path / "elsewhere")
    target = load_target(str(tiny_folder), dtype="float32", device=DEVICE)
    config = Export.load(tmp_path / "elsewhere" / "best.json", target).config
    assert config.bridge and Path(config.bridge).is_relative_to(tmp_path / "elsewhere")
    outputs_of = [generate(target, "Say 99.", config=one, max_new_tokens=24).tokens for one in (config, SpeculativeConfig())]
    assert outputs_of[0] == outputs_of[1]


def test_a_head_drafts_chains_only_if_trees_cannot_be_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The attention of GPT-Neo does not accept tree masks."""
    target = load_target(str(save_tiny(tmp_path / "model", "gpt_neo")), dtype="float32", device=DEVICE)
    head = EagleHead(EagleShape.of(target))
    save_trained(tmp_path / "head", "eagle", head.shape.to_dict(), head.weights(), target, {})
    assert list(_heads(str(tmp_path / "head"), target)) == ["eagle"]
    assert "eagle_tree: left out: " in capsys.readouterr().out


def test_a_budget_without_room_for_a_text_ends_in_one_line(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    few = "".join(f'{{"prompt": "Say {number}."}}\n' for number in range(8))
    (tmp_path / "few.jsonl").write_text(few, encoding="utf-8")
    which = (f"target.path={tiny_folder}", "prompts=jsonl", f"prompts.path={tmp_path}/few.jsonl", "calibration_bytes=9")
    done = launch("bridges", *SMALL, f"outputs={tracked(tmp_path)}", *which, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: calibration_bytes: ")


def test_too_little_memory_to_scan_ends_in_one_line(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def scarce(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Scanner, "scan", scarce)
    monkeypatch.setattr(sys, "argv", ["bridges", *SMALL, f"outputs={tmp_path}", f"target.path={tiny_folder}"])
    with pytest.raises(SystemExit) as end:
        run("bridges", bridges)
    printed = capsys.readouterr()
    assert end.value.code == 2
    assert "out of memory with 256 rows in a pass; trying 128" in printed.out
    assert printed.err.splitlines()[-1] == "error: target: there is not enough memory to scan"
    assert not [*tmp_path.glob("bridges-*")]


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("masks=[layers:90]", "masks"),
        ("masks=layers:1", "masks"),
        ("max_seconds=soon", "max_seconds"),
        ("max_seconds=-5", "max_seconds"),
        ("max_seconds=null", "max_seconds"),
        ("save_seconds=null", "save_seconds"),
        ("save_seconds=often", "save_seconds"),
        ("learning_rate=-1", "learning_rate"),
        ("learning_rate=nan", "learning_rate"),
        ("calibration_bytes=many", "calibration_bytes"),
        ("begin_like=nothing.jsonl", "begin_like"),
        ("steps=0", "steps"),
        ("kinds=[other]", "kinds"),
        ("kinds=[mlp] trained.kind=linear trained.width=0", "kinds"),
        ("kinds=linear", "kinds"),
        ("vocabularies=[x]", "vocabularies"),
        ("vocabularies=[-5]", "vocabularies"),
        ("vocabularies=48", "vocabularies"),
        ("vocabularies=[48,2]", "vocabularies"),  # padding, start and end tokens are always included
        ("trained=mlp", "trained"),
        ("trained.kind=other", "trained.kind"),
        ("trained.rank=9999", "trained.rank"),
        ("trained.width=0", "trained.width"),
        ("scan.thresholds=0.5", "scan.thresholds"),
        ("scan.thresholds=[]", "scan.thresholds"),
        ("scan.enabled=often", "scan.enabled"),
    ],
)
def test_bad_input_ends_in_one_line_before_anything_is_written(
    override: str, field: str, tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    outputs = tmp_path / "outputs"
    done = launch("bridges", *SMALL, f"target.path={tiny_folder}", f"outputs={outputs}", *override.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: {field}: ")
    assert done.stderr.count("\n") == 1
    assert not outputs.exists()

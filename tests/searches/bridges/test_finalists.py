"""Finalists' bridges are trained once, from the nearest mask's, and only used if they help."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip import AcceptRule, SkipMask, SpeculativeConfig, StopRule, Target, generate
from layerskip.bridges.bridge import load_bridges, save_bridges
from layerskip.costs.cost_model import CostProfile, DraftExtras
from layerskip.scan.scan import Scanner
from layerskip.texts.continuations import Continuation
from searches.app.checks import InputError
from searches.bridges.finalists import TrainedBridges
from searches.bridges.spec import BridgeSpec
from searches.bridges.training import BridgeTrainer
from searches.tracking.tracker import Tracker
from tests.searches.bridges.stores import LINEAR, bridged, first_bridged, new_predictor, new_store


def test_finalists_that_cannot_be_trained_keep_their_fits(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trained(_: TrainedBridges, config: SpeculativeConfig) -> SpeculativeConfig:
        raise InputError("training_bytes: 10 hold not even one text") if config.num_speculative_tokens == 1 else MemoryError

    found = [SpeculativeConfig("layer_skip", length, mask="layers:1", bridge="b") for length in (1, 2)]
    monkeypatch.setattr(TrainedBridges, "train", trained)
    assert TrainedBridges(new_store(tiny_target, tmp_path, 200)).finalists(found, []) == {}
    printed = capsys.readouterr().out
    assert "stay as they were fitted: training_bytes: 10 hold not even one text" in printed
    assert "stay as they were fitted: out of memory" in printed


@pytest.fixture
def helpful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every training helps."""
    monkeypatch.setattr("layerskip.bridges.fit.Calibration.judge", lambda _, mask, bridges: float(bridges is not None))


@pytest.fixture
def in_steps(monkeypatch: pytest.MonkeyPatch) -> float:
    """More seconds than a training needs; all trainings end after the same number of steps."""
    monkeypatch.setattr("searches.bridges.finalists._STEPS", 60)
    return 1000.0


@pytest.mark.parametrize("harm", [False, True])
def test_a_training_that_makes_drafts_worse_than_empty_skips_is_not_used(
    harm: bool,
    in_steps: float,
    tiny_target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is evaluated on held-out texts."""
    learned: list[Continuation] = []

    class Noting(BridgeTrainer):
        def loss(self, places: list[int]) -> torch.Tensor:
            learned.extend(self._continuations[place] for place in places)
            return super().loss(places)

        def train(self, tracker: Tracker | None) -> None:
            super().train(tracker)
            for parameter in self.module.parameters() if harm else ():
                parameter.data.zero_()  # equal to empty skips

    monkeypatch.setattr("searches.bridges.finalists.BridgeTrainer", Noting)
    bridge_store = new_store(tiny_target, tmp_path, 300, in_steps)
    config = first_bridged(bridge_store)
    found = TrainedBridges(bridge_store).train(config)
    printed = capsys.readouterr().out
    (folder,) = bridge_store.folder.glob("trained-*")
    about = json.loads((folder / "head.json").read_text())["training"]
    held = bridge_store.calibration.held_out
    assert held and learned and not set(held) & set(learned)
    assert about["helps"] == (about["bridged"] > about["empty"])
    assert (found is None) == (not about["helps"]) == (f"trained for {config.mask} drafts no better" in printed)
    assert (found is None) == harm
    assert TrainedBridges(bridge_store).train(config) == found  # and it is not trained again
    assert sorted(path.name for path in bridge_store.folder.glob("trained-*")) == [folder.name]


def test_training_starts_from_the_nearest_mask(
    in_steps: float, helpful: None, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str | None] = []

    class Noting(BridgeTrainer):
        def initialise(self) -> None:
            begun.append(None if self._warm_start is None else self._warm_start.shape.mask)
            super().initialise()

    monkeypatch.setattr("searches.bridges.finalists.BridgeTrainer", Noting)
    monkeypatch.setattr("layerskip.bridges.fit.Fit.helps", True)
    bridge_store = new_store(tiny_target, tmp_path, 200, in_steps)
    trainer, masks = TrainedBridges(bridge_store), ["layers:0", "layers:0-2", "layers:0-1", "attention:1"]
    for mask in masks:
        trainer.train(bridged(bridge_store, mask))
    assert begun == [None, "layers:0", "layers:0-2", "layers:0-1"]  # of two equally near ones, the one that was trained last
    again = new_store(tiny_target, tmp_path, 200, in_steps)
    trainer = TrainedBridges(again)
    for mask in (masks[0], "attention:2"):  # trained bridges are not trained again, but are starting points
        trainer.train(bridged(again, mask))
    assert begun[len(masks) :] == ["layers:0"]


def test_the_draft_length_of_trained_bridges_is_predicted_again(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice is the best by counts of real decoding, whatever was best for the closed form."""
    layers, verify = tiny_target.layers, (8.0, 8.2, 8.4, 8.6, 8.8)
    profile = CostProfile(20, 0.05, 0.01, (0.01,) * layers, (0.01,) * layers, 0.01, 0.3, verify, 0.02, 1e-5)
    bridge_store = new_store(tiny_target, tmp_path)
    fitted = first_bridged(bridge_store)
    mask = SkipMask.parse(fitted.mask, layers)
    plain = new_predictor(tiny_target, tmp_path, profile, ("Say one.", "Say two."), 20)
    predictors = [bridge_store.predictor(plain, made) for made in (BridgeSpec("mean"), LINEAR)]
    folders = {}
    for spoilt in (0.0, 0.3, 10.0):
        bridges = load_bridges(fitted.bridge, tiny_target, mask)
        for parameter in bridges.parameters():
            parameter.data += spoilt * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        folders[spoilt] = tmp_path / f"trained-{spoilt}"
        about = {"bridge": "linear", "rank": 0, "width": 0, "seconds": spoilt}
        save_bridges(folders[spoilt], bridges, tiny_target, about, "texts")
    each = profile.draft_seconds(mask, extras=DraftExtras(**bridges.shape.size))
    trainer = TrainedBridges(bridge_store)
    for folder in folders.values():
        monkeypatch.setattr(trainer, "train", lambda config, folder=folder: replace(config, bridge=str(folder)))
        (found,) = trainer.finalists([fitted] * 2, predictors)
        worth = {}
        for choice in [(length, StopRule()) for length in range(1, 5)]:
            asked, rounds = replace(fitted, bridge=str(folder), num_speculative_tokens=choice[0], stop=choice[1]), []
            for continuation in plain._scanner.continuations:
                rounds += generate(tiny_target, list(continuation.prompt), asked, max_new_tokens=20).stats.rounds
            cost = each + (0.01 if choice[1].method == "threshold" else 0.0)
            spent = sum(verify[r.drafted] + cost * r.drafted + (0.3 if r.drafted else 0.0) for r in rounds)
            worth[asked] = sum(r.committed for r in rounds) / spent
        assert worth[found] == pytest.approx(max(worth.values()))
    monkeypatch.setattr(Scanner, "scan", None)  # a second scan would fail
    (again,) = trainer.finalists([fitted], predictors)
    assert again == found


@pytest.mark.parametrize("memory", [True, False])
def test_finalists_keep_their_draft_length_if_it_cannot_be_predicted(
    memory: bool, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def scan(*asked: Any, **more: Any) -> None:
        assert not memory
        raise MemoryError

    layers = tiny_target.layers
    profile = CostProfile(20, 0.4, 0.1, (0.1,) * layers, (0.1,) * layers, 0.01, 0.3, (8.0, 9.0, 10.0, 11.0, 12.0))
    bridge_store = new_store(tiny_target, tmp_path)
    fitted = first_bridged(bridge_store)
    # Scans predict neither other acceptance rules nor longer drafts.
    others = [replace(fitted, accept=AcceptRule("typical")), replace(fitted, num_speculative_tokens=9)]
    predictor = bridge_store.predictor(new_predictor(tiny_target, tmp_path, profile), LINEAR)
    monkeypatch.setattr(Scanner, "scan", scan)
    trainer = TrainedBridges(bridge_store)
    monkeypatch.setattr(trainer, "train", lambda config: config)
    asked = others if memory else [fitted]
    assert trainer.finalists(asked, [predictor]) == {config: config for config in asked}
    assert ("drafts as far as before its training: out of memory" in capsys.readouterr().out) != memory


@pytest.mark.parametrize("timed", [True, False])
def test_bridges_of_cascades_are_trained_and_their_drafting_is_timed(
    timed: bool, tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup = SpeculativeConfig("prompt_lookup", 3)
    fitted = SpeculativeConfig("layer_skip", 2, mask="layers:1", bridge="fitted")
    useless = replace(fitted, mask="layers:2", bridge="useless")
    cascades = [
        SpeculativeConfig("cascade", members=(lookup, member), verify_cost=(1.0, 1.1), draft_cost=(0.0, cost))
        for member, cost in ((fitted, 0.5), (useless, 0.6))
    ]
    trainer = TrainedBridges(new_store(tiny_target, tmp_path), draft_cost=lambda _: (0.0, 0.7) if timed else ())
    monkeypatch.setattr(trainer, "train", lambda c: replace(c, bridge="trained") if c.bridge == "fitted" else None)
    trained = lookup, replace(fitted, bridge="trained")
    expected = replace(cascades[0], members=trained, draft_cost=(0.0, 0.7 if timed else 0.5))
    assert trainer.finalists([*cascades, lookup], []) == {expected: cascades[0]}

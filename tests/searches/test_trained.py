"""Bridges of finalists: trained once, from their nearest neighbour on, and never at the cost of what was searched for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from layerskip import Sampling, SkipMask, SpeculativeConfig, Target, generate
from layerskip.bridge import load_bridges
from layerskip.passages import Passage
from layerskip.view import skip_view
from searches.application import InputError
from searches.bridging import BridgeLearner
from searches.layerskip import _train_finalists
from searches.makeup import Makeup
from searches.objective import MeasureSettings
from searches.shelf import BridgingSettings, Shelf
from searches.standings import Standing
from searches.tracking import Tracker
from searches.trained import TrainedBridges

LINEAR = Makeup("linear")


def test_finalists_that_cannot_be_trained_are_measured_as_they_are(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trained(_: TrainedBridges, config: SpeculativeConfig) -> SpeculativeConfig:
        raise InputError("training_bytes: 10 hold not even one text") if config.draft_length == 1 else MemoryError

    found = [Standing(SpeculativeConfig("layer_skip", length, mask="layers:1", bridge="b")) for length in (1, 2)]
    monkeypatch.setattr("searches.layerskip.contenders", lambda *_: found)
    monkeypatch.setattr(TrainedBridges, "of", trained)
    shelf = Shelf(tiny_target, Sampling(), BridgingSettings(200, 16, 8, 2**24, 0.5), tmp_path, 0)
    plan = SimpleNamespace(space=SimpleNamespace(shelf=shelf), measuring=MeasureSettings())
    assert _train_finalists(plan, None, None) == []  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert "stay as they were fitted: training_bytes: 10 hold not even one text" in said
    assert "stay as they were fitted: out of memory" in said


def test_finalists_are_trained_once(tiny_target: Target, tmp_path: Path) -> None:
    shelf = Shelf(tiny_target, Sampling(), BridgingSettings(200, 16, 8, 2**24, 0.5), tmp_path, 0)
    mask = next(m for m in (SkipMask.parse(f"layers:{i}", tiny_target.layers) for i in range(3)) if shelf.bridge(m, LINEAR))
    config = SpeculativeConfig("layer_skip", 2, mask=mask.format(), bridge=shelf.bridge(mask, LINEAR))
    grown = TrainedBridges(shelf)
    trained = grown.of(config)
    before, after = (load_bridges(found.bridge, tiny_target, mask).state_dict() for found in (config, trained))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert shelf.makeup(trained) == LINEAR
    written = (Path(trained.bridge) / "head.json").stat().st_mtime_ns
    assert grown.of(config) == trained
    assert (Path(trained.bridge) / "head.json").stat().st_mtime_ns == written
    plain = generate(tiny_target, "Hello.", SpeculativeConfig(), max_new_tokens=12)
    assert generate(tiny_target, "Hello.", trained, max_new_tokens=12).tokens == plain.tokens


@pytest.mark.parametrize("harm", [False, True])
def test_a_training_that_makes_drafts_worse_than_empty_skips_is_not_used(
    harm: bool, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And is judged on texts that it did not learn from, by real drafts of one token behind each of their prefixes."""
    learnt: list[Passage] = []

    class Noting(BridgeLearner):
        def loss(self, places: list[int]) -> torch.Tensor:
            learnt.extend(self._passages[place] for place in places)
            return super().loss(places)

        def learn_all(self, tracker: Tracker | None) -> None:
            super().learn_all(tracker)
            for parameter in self.module.parameters() if harm else ():
                parameter.data.zero_()  # as good as empty skips, hence no better

    monkeypatch.setattr("searches.trained.BridgeLearner", Noting)
    settings = BridgingSettings(300, 16, 8, 2**24, 0.5)
    shelf = Shelf(tiny_target, Sampling(), settings, tmp_path, 0)
    mask = next(m for m in (SkipMask.parse(f"layers:{i}", tiny_target.layers) for i in range(3)) if shelf.bridge(m, LINEAR))
    config = SpeculativeConfig("layer_skip", 2, mask=mask.format(), bridge=shelf.bridge(mask, LINEAR))
    found = TrainedBridges(shelf).of(config)
    said = capsys.readouterr().out
    (folder,) = shelf.folder.glob("trained-*")
    about = json.loads((folder / "head.json").read_text())["training"]
    held = shelf.calibration.held
    assert held and learnt and not set(held) & set(learnt)
    assert about["helps"] == (about["bridged"] > about["empty"])
    assert (found is None) == (not about["helps"]) == (f"trained for {mask.format()} drafts no better" in said)
    assert (found is None) == harm
    bridges = load_bridges(folder, tiny_target, mask)
    rows = [(passage, s) for passage in held for s in range(passage.starts)][-round(0.2 * len(shelf.calibration.starts)) :]
    for chosen, rate in ((None, about["empty"]), (bridges, about["bridged"])):
        view, right = skip_view(tiny_target.model, mask, chosen), 0
        for passage, s in rows:
            ids = torch.tensor([[*passage.prompt, *passage.tokens[: s + 1]]])
            with torch.no_grad():
                cache = tiny_target.model(input_ids=ids[:, :-1], use_cache=True).past_key_values
                drafted = view(input_ids=ids[:, -1:], past_key_values=cache).logits[0, -1].argmax()
            right += int(drafted) == passage.tokens[s + 1]
        assert right / len(rows) == pytest.approx(rate, abs=1.5 / len(rows))
    assert TrainedBridges(shelf).of(config) == found  # nor is it trained again
    assert sorted(path.name for path in shelf.folder.glob("trained-*")) == [folder.name]


def test_finalists_begin_as_their_nearest_neighbour(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str | None] = []

    class Noting(BridgeLearner):
        def begin(self) -> None:
            begun.append(None if self._neighbour is None else self._neighbour.shape.mask)
            super().begin()

    monkeypatch.setattr("searches.trained.BridgeLearner", Noting)
    monkeypatch.setattr("layerskip.bridge_fit.Fit.helps", True)
    # On a busy machine a fifth of a second of training may leave a draft no better than an empty skip.
    monkeypatch.setattr("layerskip.bridge_fit.Calibration.judge", lambda _, mask, bridges: float(bridges is not None))
    settings = BridgingSettings(200, 16, 8, 2**24, 0.2)
    shelf = Shelf(tiny_target, Sampling(), settings, tmp_path, 0)
    grown, masks = TrainedBridges(shelf), ["layers:0", "layers:0-2", "layers:0-1", "attention:1"]
    for mask in masks:
        grown.of(_bridged(shelf, mask))
    assert begun == [None, "layers:0", "layers:0-2", "layers:0-1"]  # of two as near, the one that was trained last
    again = Shelf(tiny_target, Sampling(), settings, tmp_path, 0)
    grown = TrainedBridges(again)
    for mask in (masks[0], "attention:2"):  # what was trained before is not trained again, and is a neighbour
        grown.of(_bridged(again, mask))
    assert begun[len(masks) :] == ["layers:0"]


def _bridged(shelf: Shelf, text: str) -> SpeculativeConfig:
    mask = SkipMask.parse(text, shelf.target.layers)
    return SpeculativeConfig("layer_skip", 2, mask=mask.format(), bridge=shelf.bridge(mask, LINEAR))

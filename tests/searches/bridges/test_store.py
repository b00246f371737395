"""Bridges in a search are fitted once, predicted with the mask, and tried by trials."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import optuna
import pytest
import torch

from layerskip import Export, SkipMask, SpeculativeConfig, Target, generate
from layerskip.bridges.bridge import load_bridges
from layerskip.costs.cost_model import NO_EXTRAS, CostProfile
from layerskip.models.draft_head import load_draft_tokens
from layerskip.models.loading import load_draft
from searches.bridges.spec import BridgeSpec, bridge_specs
from searches.bridges.store import BRIDGES_FOLDER, BridgedDrafts, BridgeStore
from searches.bridges.training import BridgeTrainer
from searches.space.search_space import SearchSpace
from searches.study.leaderboard import LeaderboardEntry, configuration
from tests.families import build
from tests.searches.bridges.stores import LINEAR, first_bridged, new_predictor, new_store
from tests.searches.conftest import Launch
from tests.searches.programs import quick, stored_study, tracked
from tests.searches.space.test_search_space import drawn
from tests.tiny import save_tiny

pytestmark = pytest.mark.system


@pytest.fixture
def bridge_store(tiny_target: Target, tmp_path: Path) -> BridgeStore:
    return new_store(tiny_target, tmp_path)


def _too_large(*_: object, **__: object) -> torch.Tensor:
    return torch.empty(2**60)


def test_bridges_are_fitted_once(bridge_store: BridgeStore, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = [SkipMask.parse(text, tiny_target.layers) for text in ("layers:1", "layers:1-2", "mlp:1", "attention:2")]
    found = [bridge_store.bridge(mask, LINEAR) for mask in masks]
    assert any(found)
    monkeypatch.setattr("searches.bridges.training.Calibration", None)  # a further fit would fail
    again = new_store(tiny_target, bridge_store.folder.parents[1])
    assert [again.bridge(mask, LINEAR) for mask in masks] == found
    for mask, folder in zip(masks, found, strict=True):
        if folder:
            about = json.loads((Path(folder) / "head.json").read_text())["training"]
            assert about["bridged"] > about["empty"]
            assert load_bridges(folder, tiny_target, mask).shape.kind == "linear"
    assert bridge_store.bridge(SkipMask.none(tiny_target.layers), LINEAR) == ""
    assert bridge_store.bridge(masks[0], BridgeSpec()) == ""


def test_bridges_that_do_not_help_are_not_used(
    bridge_store: BridgeStore, tiny_target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mask = SkipMask.parse("layers:1", tiny_target.layers)
    monkeypatch.setattr("layerskip.bridges.fit.Fit.helps", False)
    assert bridge_store.bridge(mask, LINEAR) == ""
    assert "layers:1 drafts no better" in capsys.readouterr().out
    assert bridge_store.bridge(mask, LINEAR) == ""
    assert BridgedDrafts(bridge_store, LINEAR).extras(mask) == NO_EXTRAS


def test_bridges_that_do_not_fit_into_memory_are_left_out(
    bridge_store: BridgeStore,
    tiny_target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither they nor predictions without them are saved, so both are made when there is room."""
    layers = tiny_target.layers
    mask, other = (SkipMask.parse(text, layers) for text in ("layers:1-2", "layers:2"))
    profile = CostProfile(20, 4.0, 0.1, (0.5,) * layers, (1.0,) * layers, 0.01, 0.3, (8.0, 9.0, 10.0, 11.0))
    plain = new_predictor(tiny_target, tmp_path, profile)
    with monkeypatch.context() as patch:
        patch.setattr("layerskip.bridges.fit.regress", _too_large)
        assert bridge_store.bridge(mask, LINEAR) == ""
        assert "layers:1-2 is left out: out of memory" in capsys.readouterr().out
        assert BridgedDrafts(bridge_store, LINEAR).extras(mask) == NO_EXTRAS
        assert bridge_store.bridge(other, LINEAR) == ""
        assert "layers:2 is left out" in capsys.readouterr().out  # the states fit, so other masks are tried
        blind = bridge_store.predictor(plain, LINEAR)
        blind.predict([mask])
        blind.agreements([mask])
    assert not list((tmp_path / "scans").rglob("*.jsonl"))
    again = new_store(tiny_target, tmp_path)
    again.predictor(plain, LINEAR).predict([mask])
    assert list(bridge_store.folder.glob("*/head.json"))
    assert list((tmp_path / "scans").rglob("counts.jsonl"))


def test_states_that_do_not_fit_into_memory_are_read_once(
    bridge_store: BridgeStore, tiny_target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("layerskip.bridges.fit.TextBatch", _too_large)
    for number in (1, 2):
        assert bridge_store.bridge(SkipMask.parse(f"layers:{number}", tiny_target.layers), LINEAR) == ""
    assert capsys.readouterr().out.count("out of memory") == 1


def test_models_without_independent_rows_are_not_bridged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = Target(build("gpt_neo"))
    bridge_store = new_store(target, tmp_path)
    for number in (0, 1):
        assert bridge_store.bridge(SkipMask.parse(f"layers:{number}", target.layers), LINEAR) == ""
    assert capsys.readouterr().out.count("bridge: all are left out: GPTNeoForCausalLM") == 1


def test_choices_and_bridged_configurations_are_inverse(bridge_store: BridgeStore, tiny_target: Target) -> None:
    space = SearchSpace(
        tiny_target.layers, ["layer_skip"], 1, 0, {"layer_skip": {"siblings": (0, 1)}},
        bridges=["none", "mean", "linear", "mlp"], ranks=[0, 8], widths=[4, 6],
        draft_heads=[0, 40], bridge_store=bridge_store,
    )  # fmt: skip
    configs = drawn(space, 80)
    assert {bridge_store.bridge_spec(config).tokens for config in configs} == {0, 40}
    assert {bridge_store.bridge_spec(config).bridge for config in configs} == {"none", "mean", "linear", "mlp"}
    assert {bridge_store.bridge_spec(config).width for config in configs} == {0, 4, 6}


def test_draft_heads_of_other_tokenizers_hold_the_translated_tokens(
    bridge_store: BridgeStore, tiny_target: Target, tmp_path: Path
) -> None:
    draft = save_tiny(tmp_path / "draft", seed=2)
    ranges = {"cross_tokenizer": {"draft_model": [str(draft)]}}
    space = SearchSpace(
        tiny_target.layers, ["cross_tokenizer"], 1, 0, ranges, draft_heads=[0, 40], bridge_store=bridge_store
    )
    assert space.fitted
    configs = [config for config in drawn(space, 20) if config.method == "cross_tokenizer"]
    assert {bridge_store.bridge_spec(config).tokens for config in configs} == {0, 40}
    model = load_draft(tiny_target, str(draft), same_tokenizer=False)
    found = load_draft_tokens(bridge_store.draft_model_head(str(draft), 40), model).tolist()
    assert model.tokenizer is not None
    answers = "".join(tiny_target.decode(text.tokens[text.begin :]) for text in bridge_store.texts)
    counts = Counter(model.tokenizer(answers, add_special_tokens=False)["input_ids"])
    assert {token for token, _ in counts.most_common(20)} <= set(found)
    assert model.eos_ids <= set(found)


def test_a_predictor_includes_bridges_and_draft_heads(
    bridge_store: BridgeStore, tiny_target: Target, tmp_path: Path
) -> None:
    """Its counts are those of the real decoder, and its costs include the bridges and the draft head."""
    layers = tiny_target.layers
    profile = CostProfile(20, 4.0, 0.1, (0.5,) * layers, (1.0,) * layers, 0.01, 0.3, (8.0, 9.0, 10.0, 11.0), 0.2, 1e-4, 0.01)
    plain = new_predictor(tiny_target, tmp_path, profile, ("Say one.", "Say two."))
    mask = SkipMask.parse(first_bridged(bridge_store).mask, layers)
    specs = bridge_specs(["none", "linear"], [0], [0, 60])
    assert specs == [BridgeSpec(), BridgeSpec(tokens=60), LINEAR, BridgeSpec("linear", tokens=60)]
    specs.append(BridgeSpec("mlp", 8, 60, 4))
    assert bridge_specs(["mlp", "mean"], [8], [60], [4]) == [BridgeSpec(), specs[-1], BridgeSpec("mean", tokens=60)]
    found = {bridge_spec: bridge_store.predictor(plain, bridge_spec) for bridge_spec in specs}
    for bridge_spec, predictor in found.items():
        (best,) = predictor.predict([mask])
        assert best.config.bridge == bridge_store.bridge(mask, bridge_spec)
        assert best.config.draft_head == bridge_store.head(bridge_spec.tokens)
        assert [other for other in found.values() if other.can_predict(best.config)] == [predictor]
        assert predictor.speedup(best.config) == pytest.approx(best.speedup)
        rounds = []
        for continuation in plain._scanner.continuations:
            rounds += generate(tiny_target, list(continuation.prompt), best.config, max_new_tokens=10).stats.rounds
        drafted, tokens = sum(r.drafted for r in rounds), sum(r.committed for r in rounds)
        left_out = tiny_target.vocabulary - bridge_spec.tokens if bridge_spec.tokens else 0
        each = profile.draft_seconds(mask) - 0.01 * left_out
        if bridge_store.bridge(mask, bridge_spec):
            each += 0.2 + 1e-4 * ({"linear": 32 * 32, "mlp": 2 * 8 * 32 + 3 * 4 * 32}[bridge_spec.bridge] + 32)
        spent = drafted * each + sum((0.3 if r.drafted else 0.0) + 8.0 + r.drafted for r in rounds)
        assert best.speedup == pytest.approx(tokens * 8.0 / spent)


def test_a_study_tries_bridges_and_trains_only_those_of_finalists(
    tiny_folder: Path, tiny_target: Target, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    class Recording(BridgeTrainer):
        def initialise(self) -> None:
            trained.append(self.bridges.shape.mask)
            super().initialise()

    def one_bridged(study: optuna.Study, count: int) -> list[LeaderboardEntry]:
        """Return a bridged trial, which need not be among the fastest of a tiny random model."""
        tried = [configuration(trial) for trial in study.trials if "config" in trial.user_attrs]
        return [LeaderboardEntry(config) for config in tried if config.bridge][:1]

    monkeypatch.setattr("searches.bridges.finalists.BridgeTrainer", Recording)
    monkeypatch.setattr("searches.study.sweep.contenders", one_bridged)
    bridging = ("bridging.tokens=200", "bridging.max_new_tokens=16", "bridging.batch=8", "bridging.train_seconds=0.5")
    space = ("space.bridges=[none,linear,mlp]", "space.widths=[8]", "space.draft_heads=[0,60]")
    which = ("space=bridged", *space, "scan.proposals.screened=12", "scan.proposals.enqueued=2")
    overrides = (*quick(tiny_folder, tracked(tmp_path), "study.n_trials=10", "study.name=one"), *bridging, *which)
    done = launch("layerskip", *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    configs = [trial.user_attrs["config"] for trial in stored_study(tmp_path, "one").trials]
    assert any("bridge" in config for config in configs)
    assert any("draft_head" in config for config in configs)
    kept = tmp_path.glob(f"{BRIDGES_FOLDER}/*/*/head.json")
    fitted = [json.loads(path.read_text()) for path in kept if not path.parent.name.startswith(("head", "trained"))]
    widths = {(about["shape"]["kind"], about["shape"]["width"], about["training"]["width"]) for about in fitted}
    assert widths == {("linear", 0, 0), ("mlp", 8, 8)}
    (finalist,) = one_bridged(stored_study(tmp_path, "one"), 1)
    assert trained == [finalist.config.mask]
    assert len({about["shape"]["mask"] for about in fitted}) > 1
    found = Export.load(tmp_path / "one" / "best.json", tiny_target).config
    plain = generate(tiny_target, "a prompt", SpeculativeConfig(), max_new_tokens=12)
    assert generate(tiny_target, "a prompt", found, max_new_tokens=12).tokens == plain.tokens

"""Tests of ``searches.evaluate.race``: strategies, verdict, and a race on a tiny model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerskip import DraftPlan, PromptSet, draft_plan
from searches.evaluate.race import STRATEGIES, Race, judge, verdict
from searches.predict.proposals import ProposalSettings
from searches.space.search_space import SearchSpace
from tests.searches.conftest import Launch
from tests.searches.known import Known
from tests.searches.predict.test_proposals import LAYERS, additive

pytestmark = pytest.mark.system

PROGRAM = "evaluate.race"


class _Scanner:
    """Screens masks of a known landscape."""

    def sample(self, rows: int) -> _Scanner:
        return self

    def scan(self, masks: Sequence[DraftPlan], depth: int) -> list[Any]:
        return [SimpleNamespace(agreement=agreement) for agreement in additive(0).agreements(masks)]


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Race]:
    """Makes a race on a known landscape, by a clock that ticks whenever it is read."""
    monkeypatch.setattr("searches.evaluate.race.monotonic", itertools.count(1.0).__next__)
    prepared: Any = SimpleNamespace(outputs=Path(), predictor=lambda *_: additive(0), scanner=lambda *_: _Scanner())
    measuring, scanning = SimpleNamespace(max_new_tokens=8), SimpleNamespace(proposals=ProposalSettings())
    parts: Any = SimpleNamespace(
        bench=Known({}), prompts=PromptSet.of(["one"]), space=SearchSpace(LAYERS), measuring=measuring, scanning=scanning
    )
    return lambda seconds: Race(parts, prepared, seconds, 0)


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_strategy_claims_only_layer_skipping_within_the_budget(name: str, race: Callable[..., Race]) -> None:
    run = race(40.0)
    STRATEGIES[name](run)
    times = [when for when, _ in run.claims]
    assert times == sorted(times)
    assert 0 < times[0] <= times[-1] <= 41
    assert {config.method for _, config in run.claims} == {"layer_skip"}
    if name == "swift":
        assert {sum(map(len, draft_plan.sublayers(config.mask))) for _, config in run.claims} == {round(0.45 * 2 * LAYERS)}
    else:
        assert run.measured > 0
    none = race(0.5)
    STRATEGIES[name](none)
    assert not none.claims


def test_the_verdict_is_when_ours_was_as_fast() -> None:
    def search(name: str, spent: float, *points: tuple[float, float]) -> dict[str, object]:
        curve = [{"seconds": seconds, "held_out_speedup": speedup} for seconds, speedup in points]
        return {"strategy": name, "seed": 0, "spent": spent, "curve": curve}

    ours = search("ours", 100.0, (5, 0.9), (10, 1.1))
    others = search("random", 104.0, (1, 1.0), (90, 1.05)), search("tpe", 100.0, (1, 1.2)), search("swift", 40.0, (1, 1.0))
    found = {row["strategy"]: row["share_of_its_seconds"] for row in verdict([ours, *others], 100.0)}
    # The time of a search is at most the budget, and less if it ended by itself.
    assert found == {"random": 0.1, "tpe": None, "swift": 0.25}
    row = {"strategy": "swift", "seed": 0}
    fast, never = row | {"share_of_its_seconds": 0.04}, row | {"share_of_its_seconds": None}
    assert [count.passed for count in judge([fast, never], 0.05)] == [True, False]
    assert [count.passed for count in judge([fast, never], None)] == [True, True]
    assert [count.passed for count in judge([], 0.05)] == [False]


def test_the_program_races_and_resumes(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    overrides = (
        *("target=local", f"target.path={tiny_folder}", "target.dtype=float32", "target.device=cpu", "seeds=[0]"),
        *("space.protect_first=0", "space.protect_last=0", "seconds=6", "strategies=[draft_verify,ours]", "max_share=null"),
        *("measure.max_new_tokens=8", "measure.prompts=2", "measure.held_out_prompts=2"),
        *("scan.proposals.screened=20", "scan.proposals.scanned=3", f"outputs={tmp_path}"),
    )
    done = launch(PROGRAM, *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "race.json").read_text())
    assert [row["strategy"] for row in record["searches"]] == ["draft_verify", "ours"]
    assert record["searches"][0]["curve"]
    assert all(point["held_out_speedup"] > 0 for row in record["searches"] for point in row["curve"])
    assert launch(PROGRAM, *overrides, cwd=tmp_path).returncode == 0
    assert json.loads((tmp_path / "race.json").read_text())["searches"] == record["searches"]

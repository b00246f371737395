"""Tests of ``searches.evaluate.race``: strategies, verdict, and a race on a tiny model."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerskip import PromptSet, SpeculativeConfig, mask
from searches.evaluate.race import STRATEGIES, Race, Screen, TimeUp, _counts, verdict
from searches.predict.predictor import Prediction
from searches.predict.proposals import ProposalSettings, propose
from searches.space.search_space import SearchSpace
from tests.searches.conftest import Launch
from tests.searches.known import Known
from tests.searches.predict.test_proposals import LAYERS, Landscape

pytestmark = pytest.mark.system

PROGRAM = "evaluate.race"


class _Known(Race):
    """A race on a known landscape, by a clock that ticks whenever it is read."""

    def propose(self) -> list[Prediction]:
        return propose(Landscape(0), self.space, ProposalSettings(), self.check_budget, on_best=self.claim)

    def screen(self) -> Screen:
        return Landscape(0).agreements


def _race(seconds: float) -> Race:
    parts: Any = SimpleNamespace(bench=Known({}), prompts=PromptSet.of(["one"]), space=SearchSpace(LAYERS))
    nothing: Any = None
    return _Known(parts, nothing, seconds, 0, itertools.count(1.0).__next__)


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_strategy_claims_only_layer_skipping_within_the_budget(name: str) -> None:
    race = _race(90.0)
    with contextlib.suppress(TimeUp):
        STRATEGIES[name](race)
    times = [when for when, _ in race.claims]
    assert times == sorted(times)
    assert 0 < times[0] <= times[-1] <= 91
    assert {config.method for _, config in race.claims} == {"layer_skip"}
    if name == "swift":
        assert {sum(mask.count_skipped(config.mask)) for _, config in race.claims} == {round(0.45 * 2 * LAYERS)}
    else:
        assert race.measured > 0


def test_nothing_is_claimed_after_the_budget() -> None:
    race = _race(20.0)
    with pytest.raises(TimeUp):
        STRATEGIES["ours"](race)
    assert race.claims and all(when <= 20.0 for when, _ in race.claims)
    race = _race(1.0)
    with pytest.raises(TimeUp):
        STRATEGIES["ours"](race)
    assert not race.claims


def test_the_verdict_is_when_ours_was_as_fast() -> None:
    def search(name: str, spent: float, *points: tuple[float, float]) -> dict[str, object]:
        curve = [{"seconds": seconds, "held_out_speedup": speedup} for seconds, speedup in points]
        return {"strategy": name, "seed": 0, "spent": spent, "curve": curve}

    ours = search("ours", 100.0, (5, 0.9), (10, 1.1))
    others = search("random", 104.0, (1, 1.0), (90, 1.05)), search("tpe", 100.0, (1, 1.2)), search("swift", 40.0, (1, 1.0))
    found = {row["strategy"]: row["share_of_its_seconds"] for row in verdict([ours, *others], 100.0)}
    # The time of a search is at most the budget, and less if it ended by itself.
    assert found == {"random": 0.1, "tpe": None, "swift": 0.25}


def test_every_other_search_has_a_criterion() -> None:
    row = {"strategy": "swift", "seed": 0, "held_out_speedup": 1.1}
    fast, never = row | {"share_of_its_seconds": 0.04}, row | {"share_of_its_seconds": None}
    assert [count.passed for count in _counts([fast, never], 0.05)] == [True, False]
    assert [count.passed for count in _counts([fast, never], None)] == [True, True]
    assert [count.passed for count in _counts([], 0.05)] == [False]


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
    for row in record["searches"]:
        for point in row["curve"]:
            assert SpeculativeConfig.from_dict(point["config"]).method == "layer_skip"
            assert point["held_out_speedup"] > 0
    again = launch(PROGRAM, *overrides, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "race.json").read_text())["searches"] == record["searches"]

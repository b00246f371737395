"""Tests of ``searches.evaluate.race``: strategies, verdict, table, and races on a tiny model and on simulated decoders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from layerskip import PromptSet, SpeculativeConfig, mask
from searches.app.checks import InputError
from searches.app.composition import compose_config
from searches.evaluate.landscape import Landscape as SimulatedLandscape
from searches.evaluate.race import race_strategies, table, verdict
from searches.evaluate.strategies import STRATEGIES, Race, Screen, TimeUp
from searches.space.search_space import SearchSpace
from tests.searches.conftest import Launch
from tests.searches.known import Known
from tests.searches.predict.test_proposals import LAYERS, Landscape

PROGRAM = "evaluate.race"
CONF = str(Path(__file__).parents[3] / "conf")


def _clock(step: float) -> Callable[[], float]:
    now = [0.0]

    def tick() -> float:
        now[0] += step
        return now[0]

    return tick


def _predictors() -> tuple[Callable[[], Landscape], Callable[[], Screen]]:
    return lambda: Landscape(0), lambda: Landscape(0).agreements


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_strategy_claims_only_layer_skipping_within_the_budget(name: str) -> None:
    space = SearchSpace(LAYERS)
    race = Race(Known({}), PromptSet.of(["one"]), LAYERS, 90.0, 0, space, *_predictors(), _clock(1.0))
    with pytest.raises(TimeUp):
        STRATEGIES[name](race)
    times = [when for when, _ in race.claims]
    assert times == sorted(times)
    assert 0 < times[0] <= times[-1] <= 91
    assert {config.kind for _, config in race.claims} == {"layer_skip"}
    if name == "tpe":
        assert {config.draft_length for _, config in race.claims} == {5}
    if name == "swift":
        assert {sum(mask.count_skipped(config.mask)) for _, config in race.claims} == {round(0.45 * 2 * LAYERS)}
    else:
        assert race.measured > 0


def test_nothing_is_claimed_after_the_budget() -> None:
    race = Race(Known({}), PromptSet.of(["one"]), LAYERS, 20.0, 0, SearchSpace(LAYERS), *_predictors(), _clock(1.0))
    with pytest.raises(TimeUp):
        STRATEGIES["ours"](race)
    assert race.claims and all(when <= 20.0 for when, _ in race.claims)
    race = Race(Known({}), PromptSet.of(["one"]), LAYERS, 1.0, 0, SearchSpace(LAYERS), *_predictors(), _clock(1.0))
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


def test_the_table_compares_nothing_with_a_search_that_was_not_run() -> None:
    def search(name: str, *curve: dict[str, float]) -> dict[str, object]:
        return {"strategy": name, "seed": 0, "measured": 1, "curve": list(curve)}

    point = {"seconds": 1.0, "held_out_speedup": 1.1}
    searches = [search("random", point), search("swift")]
    record = {"searches": searches, "verdict": verdict(searches, 9.0), "seconds": 9.0, "date": "today"}  # type: ignore[arg-type]
    text = table(record | {"environment": {"device_name": "x"}, "target": {"name": "t", "dtype": "d"}})
    assert "| random | 0 | 1 | 1.100 |  |" in text
    assert "| swift | 0 | 1 | nothing claimed |  |" in text


def test_the_program_races_and_resumes(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    overrides = (
        *("target=local", f"target.path={tiny_folder}", "target.dtype=float32", "target.device=cpu", "seeds=[0]"),
        *("space.protect_first=0", "space.protect_last=0", "seconds=3", "strategies=[random,ours]", "most_share=null"),
        *("measure.max_new_tokens=8", "measure.prompts=2", "measure.held_out_prompts=2"),
        *("scan.profile_repeats=2", "scan.profile_error=1"),
        *("scan.proposals.screened=20", "scan.proposals.scanned=3", f"outputs={tmp_path}"),
    )
    done = launch(PROGRAM, *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "race.json").read_text())
    assert [row["strategy"] for row in record["searches"]] == ["random", "ours"]
    assert record["searches"][0]["curve"]
    for row in record["searches"]:
        for point in row["curve"]:
            assert SpeculativeConfig.from_dict(point["config"]).kind == "layer_skip"
            assert point["held_out_speedup"] > 0
    again = launch(PROGRAM, *overrides, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "race.json").read_text())["searches"] == record["searches"]


def test_simulated_decoders_have_a_simulated_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decoding and scanning take simulated seconds, and claims have their true speedups."""
    overrides = [
        "bench=simulated",
        "layers=8",
        "seconds=100",
        "seeds=[3]",
        "strategies=[random,swift,ours]",
        "scan.prompts=4",
    ]
    config, strict = (compose_config("race", [*overrides, f"most_share={m}", f"outputs={tmp_path}"]) for m in ("null", 1e-6))
    record = race_strategies(config)
    landscape = SimulatedLandscape.draw(3, 8)
    step = landscape.profile.verify_seconds[0]
    for search in record["searches"]:
        assert 100 < search["spent"] < 120 or search["strategy"] == "swift"
        for point in search["curve"]:
            assert point["held_out_speedup"] == landscape.speedup(SpeculativeConfig.from_dict(point["config"]))
    searches = {search["strategy"]: search for search in record["searches"]}
    assert searches["ours"]["curve"][0]["seconds"] > 1000 * step  # measures a profile first
    assert searches["swift"]["curve"][0]["seconds"] < 1000 * step  # needs no profile
    assert searches["swift"]["measured"] == 0
    assert searches["random"]["measured"] > 5
    first = capsys.readouterr().out
    monkeypatch.setattr("searches.evaluate.race._search", lambda *_: pytest.fail("searched again"))
    assert race_strategies(config)["searches"] == record["searches"]
    minute = re.compile(r"\d\d:\d\d UTC")  # it may change between the two runs
    assert minute.sub("", capsys.readouterr().out) == minute.sub("", first)
    assert "simulated decoders" in first
    with pytest.raises(SystemExit, match="4"):  # ours needs more than a millionth of the other seconds
        race_strategies(strict)
    assert "MISSED" in capsys.readouterr().out
    monkeypatch.setattr("searches.evaluate.race.verdict", lambda *_: [])
    with pytest.raises(SystemExit, match="4"):  # no other search to compare with
        race_strategies(strict)
    assert "(0 searches compared)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("bench=x", "bench: 'x' is not one of model, simulated"),
        ("strategies=[x]", "strategies: 'x' is not one of random, "),
        ("strategies=[]", "strategies: is empty"),
        ("strategies=[ours]", "strategies: most_share compares ours with others"),
        ("strategies=[random,tpe]", "strategies: most_share compares ours with others"),
        ("seeds=1", "seeds: 1 is not a list"),
        ("seeds=[]", "seeds: is empty"),
        ("seeds=[-1]", "seed: -1 is not"),
        ("seconds=x", "seconds: 'x' is not a number above 0"),
        ("most_share=5%", "most_share: '5%' is neither 0 nor a number above 0"),
    ],
)
def test_bad_input_is_refused_with_the_field(override: str, says: str) -> None:
    config = compose_config("race", [override])
    with pytest.raises(InputError, match=re.escape(says)):
        race_strategies(config)

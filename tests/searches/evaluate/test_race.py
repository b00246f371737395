"""Strategies race on a tiny model; what is said of the race follows from its curves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from layerskip import PromptSet, SpeculativeConfig, mask
from searches.app.checks import InputError
from searches.evaluate.landscape import Landscape as Planted
from searches.evaluate.race import compare, table, verdict
from searches.evaluate.strategies import STRATEGIES, Race, Screen, TimeUp
from searches.space.search_space import SearchSpace
from tests.searches.conftest import Launch
from tests.searches.known import Known
from tests.searches.predict.test_proposals import LAYERS, Landscape
from tests.searches.programs import execute

CONF = str(Path(__file__).parents[3] / "conf")


def _clock(step: float) -> Callable[[], float]:
    now = [0.0]

    def tick() -> float:
        now[0] += step
        return now[0]

    return tick


def _oracles() -> tuple[Callable[[], Landscape], Callable[[], Screen]]:
    return lambda: Landscape(0), lambda: Landscape(0).agreements


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_strategy_claims_in_time_and_only_layer_skipping(name: str) -> None:
    space = SearchSpace(LAYERS)
    race = Race(Known({}), PromptSet.of(["one"]), LAYERS, 90.0, 0, space, *_oracles(), _clock(1.0))
    with pytest.raises(TimeUp):
        STRATEGIES[name](race)
    times = [when for when, _ in race.claims]
    assert times == sorted(times)
    assert 0 < times[0] <= times[-1] <= 91
    assert {config.kind for _, config in race.claims} == {"layer_skip"}
    if name == "tpe":
        assert {config.draft_length for _, config in race.claims} == {5}
    if name == "swift":
        assert {sum(mask.count(config.mask)) for _, config in race.claims} == {round(0.45 * 2 * LAYERS)}
    else:
        assert race.measured > 0


def test_nothing_is_claimed_behind_the_budget() -> None:
    race = Race(Known({}), PromptSet.of(["one"]), LAYERS, 20.0, 0, SearchSpace(LAYERS), *_oracles(), _clock(1.0))
    with pytest.raises(TimeUp):
        STRATEGIES["ours"](race)
    assert race.claims and all(when <= 20.0 for when, _ in race.claims)
    race = Race(Known({}), PromptSet.of(["one"]), LAYERS, 1.0, 0, SearchSpace(LAYERS), *_oracles(), _clock(1.0))
    with pytest.raises(TimeUp):
        STRATEGIES["ours"](race)
    assert not race.claims


def test_the_verdict_is_when_ours_was_as_good() -> None:
    def search(name: str, spent: float, *points: tuple[float, float]) -> dict[str, object]:
        curve = [{"seconds": seconds, "held_out_speedup": speedup} for seconds, speedup in points]
        return {"strategy": name, "seed": 0, "spent": spent, "curve": curve}

    ours = search("ours", 100.0, (5, 0.9), (10, 1.1))
    others = search("random", 104.0, (1, 1.0), (90, 1.05)), search("tpe", 100.0, (1, 1.2)), search("swift", 40.0, (1, 1.0))
    found = {row["strategy"]: row["share_of_its_seconds"] for row in verdict([ours, *others], 100.0)}
    # Who ends by itself has taken no more than that, and whose last measurement took longer, no more than the budget.
    assert found == {"random": 0.1, "tpe": None, "swift": 0.25}


def test_the_table_compares_nothing_with_a_search_that_did_not_run() -> None:
    def search(name: str, *curve: dict[str, float]) -> dict[str, object]:
        return {"strategy": name, "seed": 0, "measured": 1, "curve": list(curve)}

    point = {"seconds": 1.0, "held_out_speedup": 1.1}
    searches = [search("random", point), search("swift")]
    record = {"searches": searches, "verdict": verdict(searches, 9.0), "seconds": 9.0, "date": "today"}  # type: ignore[arg-type]
    text = table(record | {"environment": {"device_name": "x"}, "target": {"name": "t", "dtype": "d"}})
    assert "| random | 0 | 1 | 1.100 |  |" in text
    assert "| swift | 0 | 1 | nothing claimed |  |" in text


def test_the_program_races_and_goes_on(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    overrides = (
        *("target=local", f"target.path={tiny_folder}", "target.dtype=float32", "target.device=cpu", "seeds=[0]"),
        *("space.protect_first=0", "space.protect_last=0", "seconds=8", "strategies=[random,ours]", "most_share=null"),
        *("measure.max_new_tokens=8", "measure.prompts=2", "measure.held_out_prompts=2", "scan.profile_repeats=2"),
        *("scan.proposals.screened=20", "scan.proposals.scanned=3", f"outputs={tmp_path}"),
    )
    done = execute("compare", *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "compare.json").read_text())
    assert [row["strategy"] for row in record["searches"]] == ["random", "ours"]
    assert record["searches"][0]["curve"]
    for row in record["searches"]:
        for point in row["curve"]:
            assert SpeculativeConfig.from_dict(point["config"]).kind == "layer_skip"
            assert point["held_out_speedup"] > 0
    again = launch("compare", *overrides, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "compare.json").read_text())["searches"] == record["searches"]


def test_planted_decoders_are_raced_on_by_a_clock_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every second is one that decoding or foretelling would have taken, and what was claimed is worth what was planted."""
    overrides = [
        "bench=simulated",
        "layers=8",
        "seconds=100",
        "seeds=[3]",
        "strategies=[random,swift,ours]",
        "scan.prompts=4",
    ]
    with initialize_config_dir(CONF, version_base="1.3"):
        config, strict = (compose("compare", [*overrides, f"most_share={m}", f"outputs={tmp_path}"]) for m in ("null", 1e-6))
    record = compare(config)
    landscape = Planted.draw(3, 8)
    step = landscape.profile.verify_seconds[0]
    for search in record["searches"]:
        assert 100 < search["spent"] < 120 or search["strategy"] == "swift"
        for point in search["curve"]:
            assert point["held_out_speedup"] == landscape.speedup(SpeculativeConfig.from_dict(point["config"]))
    searches = {search["strategy"]: search for search in record["searches"]}
    assert searches["ours"]["curve"][0]["seconds"] > 1000 * step  # a profile comes first
    assert searches["swift"]["curve"][0]["seconds"] < 1000 * step  # which nobody pays who has no use for one
    assert searches["swift"]["measured"] == 0
    assert searches["random"]["measured"] > 5
    first = capsys.readouterr().out
    monkeypatch.setattr("searches.evaluate.race._search", lambda *_: pytest.fail("searched again"))
    assert compare(config)["searches"] == record["searches"]
    assert capsys.readouterr().out == first
    assert "planted decoders" in first
    with pytest.raises(SystemExit, match="4"):  # nothing was found in a millionth of the others' seconds
        compare(strict)
    assert "MISSED" in capsys.readouterr().out
    monkeypatch.setattr("searches.evaluate.race.verdict", lambda *_: [])
    with pytest.raises(SystemExit, match="4"):  # nothing was compared
        compare(strict)
    assert "(0 of their searches claimed something)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("bench=x", "bench: 'x' is not one of model, simulated"),
        ("strategies=[x]", "strategies: 'x' is not one of random, "),
        ("strategies=[]", "strategies: is empty"),
        ("strategies=[ours]", "strategies: ours and another are what most_share compares"),
        ("strategies=[random,tpe]", "strategies: ours and another are what most_share compares"),
        ("seeds=1", "seeds: 1 is not a list"),
        ("seeds=[]", "seeds: is empty"),  # nothing raced would miss no bar
        ("seeds=[-1]", "seed: -1 is not"),
        ("seconds=x", "seconds: 'x' is not a number above 0"),
        ("most_share=5%", "most_share: '5%' is neither 0 nor a number above 0"),
    ],
)
def test_what_cannot_be_raced_is_refused_by_name(override: str, says: str) -> None:
    with initialize_config_dir(CONF, version_base="1.3"):
        config = compose("compare", [override])
    with pytest.raises(InputError, match=re.escape(says)):
        compare(config)

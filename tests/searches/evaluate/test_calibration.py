"""The program that doubts winners and intervals: it passes what deserves it, and fails what does not."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from layerskip import Measurement
from searches.app.application import run
from searches.evaluate.calibration import calibrate
from searches.evaluate.criteria import Count, table
from searches.evaluate.landscape import Prospect
from searches.evaluate.planted import Outcome, PlantedSettings, summarise

FEW = ("itself.comparisons=40", "itself.prompts=12", "coverage.resamplings=40", "coverage.prompts=[12]")


def _end(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """Run the program in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["calibration", *overrides])
    with pytest.raises(SystemExit) as end:
        run("calibration", calibrate)
    assert isinstance(end.value.code, int)
    return end.value.code


def test_intervals_and_winners_are_to_be_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = _end(monkeypatch, *FEW, "coverage.least=0.85", "itself.most_winners=0.15", f"outputs={tmp_path}")
    printed = capsys.readouterr().out
    assert code == 0, printed
    record = json.loads((tmp_path / "calibration.json").read_text(encoding="utf-8"))
    assert [(count["of"], count["passed"]) for count in record["counts"]] == [(40, True)] * 3
    assert all(count["name"] in printed for count in record["counts"])


def test_an_interval_that_is_too_narrow_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = Measurement.interval

    def narrow(self: Measurement, seed: int = 0) -> tuple[float, float]:
        low, high = honest(self, seed)
        return self.speedup - 0.3 * (self.speedup - low), self.speedup + 0.3 * (high - self.speedup)

    monkeypatch.setattr(Measurement, "interval", narrow)
    assert _end(monkeypatch, *FEW, f"outputs={tmp_path}") == 4
    record = json.loads((tmp_path / "calibration.json").read_text(encoding="utf-8"))
    assert not any(count["passed"] for count in record["counts"])
    assert "MISSED" in capsys.readouterr().out


def test_a_real_target_is_compared_with_itself(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = (
        *("bench=model", "target=local", f"target.path={tiny_folder}", "target.dtype=float32", "target.device=cpu"),
        *("max_new_tokens=4", "itself.comparisons=2", "itself.prompts=5", "itself.config={kind: prompt_lookup}"),
        "itself.most_winners=null",  # readings of milliseconds may call one
        *(f"outputs={tmp_path}", f"record={tmp_path / 'mine.json'}"),
    )
    assert _end(monkeypatch, *overrides) == 0
    record = json.loads((tmp_path / "mine.json").read_text(encoding="utf-8"))
    # Nobody knows what the intervals should hold.
    (file,) = tmp_path.glob("itself-*.jsonl")
    winners = [json.loads(line)[1] for line in file.read_text(encoding="utf-8").splitlines()]
    assert [(count["times"], count["of"]) for count in record["counts"]] == [(sum(winners), 2)]
    with monkeypatch.context() as patched:
        patched.setattr("searches.evaluate.calibration._rows", lambda *_: pytest.fail("decoded again"))
        assert _end(monkeypatch, *overrides) == 0


PLANTED = (
    *("itself.comparisons=1", "coverage.resamplings=0", "planted.seeds=2", "planted.hopeless=1", "planted.layers=8"),
    *("planted.prompts=60", "planted.least_hits=0", "planted.search.study.n_trials=12"),
)


def test_searches_are_judged_by_what_was_planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _end(monkeypatch, *PLANTED, f"outputs={tmp_path}") == 0
    record = json.loads((tmp_path / "calibration.json").read_text(encoding="utf-8"))
    assert [count["of"] for count in record["counts"]] == [1, 3, 2]
    for search in record["searches"]:
        assert search["winner_speedup"] <= search["best_speedup"] * 1.001
        assert search["winner_speedup"] <= search["measured_speedup"] or search["winner"] == "no drafting"
        assert not search["slower"]
    assert (record["searches"][2]["best"], record["searches"][2]["winner"]) == ("no drafting", "no drafting")


def test_only_where_much_comes_close_may_chance_lose() -> None:
    settings = PlantedSettings(seeds=1, close=20)
    hit = Outcome(0, "hopeful", "a", 1.5, "a", 1.5, 1.5, 0.0)
    slower = Outcome(0, "close", "a", 1.01, "b", 0.998, 1.01, 0.0)
    level = dataclasses.replace(slower, winner_speedup=1.0)
    assert [count.passed for count in summarise([hit, slower, *[level] * 19], settings)] == [True, True, True]
    assert [count.passed for count in summarise([hit, *[slower] * 2, *[level] * 18], settings)] == [True, True, False]
    lost = dataclasses.replace(hit, winner_speedup=0.998)
    assert [count.passed for count in summarise([lost], settings)] == [False, False]


def test_searches_are_kept_until_the_program_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str]] = []

    def interrupted(seed: int, prospect: Prospect, *settings: Any) -> Outcome:
        asked.append((seed, prospect))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return Outcome(seed, prospect, "a", 1.5, "b", 1.4, 1.5, 0.0)

    monkeypatch.setattr("searches.evaluate.calibration.find_planted", interrupted)
    assert _end(monkeypatch, *PLANTED, f"outputs={tmp_path}") == 130
    assert _end(monkeypatch, *PLANTED, f"outputs={tmp_path}") == 0
    assert asked == [(0, "hopeful"), (1, "hopeful"), (1, "hopeful"), (0, "hopeless")]
    record = json.loads((tmp_path / "calibration.json").read_text(encoding="utf-8"))
    assert [(search["seed"], search["prospect"]) for search in record["searches"]] == asked[:2] + asked[3:]
    assert _end(monkeypatch, *PLANTED, "planted.seeds=3", f"outputs={tmp_path}") == 0
    assert asked[4:] == [(2, "hopeful")]
    monkeypatch.setattr("searches.app.record_header._ROOT", tmp_path)
    assert _end(monkeypatch, *PLANTED, f"outputs={tmp_path}") == 0
    assert asked[5:] == asked[:2] + asked[3:4]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("bench=abacus", "bench"),
        ("itself.comparisons=0", "itself.comparisons"),
        ("itself.prompts=4", "itself.prompts"),
        ("coverage.prompts=[12,x]", "coverage.prompts"),
        ("planted.layers=2", "planted.layers"),
        ("planted.least_hits=all", "planted.least_hits"),
        ("planted.most_lost=2", "planted.most_lost"),
        ("itself.most_winners=few", "itself.most_winners"),
        ("coverage.least=-1", "coverage.least"),
        ("seed=-1", "seed"),
    ],
)
def test_refusals_name_the_field(
    override: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _end(monkeypatch, override, f"outputs={tmp_path}") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {named}")
    assert not list(tmp_path.iterdir())


def test_a_bar_is_met_or_not() -> None:
    assert Count("", 19, 20, least=0.95).passed
    assert not Count("", 18, 20, least=0.95).passed
    assert Count("", 1, 20, most=0.05).passed
    assert not Count("", 2, 20, most=0.05).passed
    assert "| 5.0% | at most 1% | MISSED |" in table([Count("x", 1, 20, most=0.01)])
    assert "| 5.0% | none | met |" in table([Count("x", 1, 20)])

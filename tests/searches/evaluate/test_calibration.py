"""Tests of ``searches.evaluate.calibration``: it passes correct intervals and winners, and fails wrong ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from layerskip import Measurement
from searches.app.application import run
from searches.evaluate.calibration import calibrate, summarise
from searches.evaluate.criteria import Count

FEW = ("itself.comparisons=40", "itself.prompts=12", "coverage.resamplings=40", "coverage.prompts=[12]")


def _run(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """Run the program in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["calibration", *overrides])
    with pytest.raises(SystemExit) as end:
        run("calibration", calibrate)
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize("width", [1.0, 0.3])
def test_correct_intervals_pass_and_narrow_ones_fail(
    width: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interval = Measurement.interval

    def scaled(self: Measurement, seed: int = 0) -> tuple[float, float]:
        low, high = interval(self, seed)
        return self.speedup - width * (self.speedup - low), self.speedup + width * (high - self.speedup)

    monkeypatch.setattr(Measurement, "interval", scaled)
    code = _run(monkeypatch, *FEW, "coverage.minimum=0.85", "itself.max_winners=0.15", f"outputs={tmp_path}")
    printed = capsys.readouterr().out
    assert code == (0 if width == 1.0 else 4), printed
    record = json.loads((tmp_path / "calibration.json").read_text(encoding="utf-8"))
    assert [(count["of"], count["passed"]) for count in record["counts"]] == [(40, width == 1.0)] * 3
    assert all(count["name"] in printed for count in record["counts"])
    assert ("MISSED" in printed) == (width < 1)


PLANTED = (
    *("itself.comparisons=1", "itself.max_winners=null", "coverage.resamplings=0", "planted.seeds=2", "planted.hopeless=1"),
    *("planted.layers=8", "planted.prompts=30", "planted.min_hits=0", "planted.search.study.n_trials=12"),
)


def test_searches_are_judged_by_the_known_optimum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(monkeypatch, *PLANTED, f"outputs={tmp_path}") == 0
    record = json.loads((tmp_path / "calibration.json").read_text(encoding="utf-8"))
    assert [count["of"] for count in record["counts"]] == [1, 3, 2]
    for search in record["searches"]:
        assert search["winner_speedup"] <= search["best_speedup"] * 1.001
        assert search["winner_speedup"] <= search["measured_speedup"] or search["winner"] == "no drafting"
        assert not search["slower"]
    assert (record["searches"][2]["best"], record["searches"][2]["winner"]) == ("no drafting", "no drafting")


def test_slower_exports_are_tolerated_on_close_landscapes_only() -> None:
    def passed(*outcomes: tuple[str, bool, bool]) -> list[bool]:
        found = [dict(zip(("prospect", "hit", "slower"), outcome, strict=True)) for outcome in outcomes]
        return [count.passed for count in summarise(found, 0.95, 0.05)]

    hit, slower, level = ("hopeful", True, False), ("close", False, True), ("close", False, False)
    assert passed(hit, slower, *[level] * 19) == [True, True, True]
    assert passed(hit, *[slower] * 2, *[level] * 18) == [True, True, False]
    assert passed(("hopeful", False, True)) == [False, False]


def test_searches_are_kept_until_the_program_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[tuple[int, str]] = []

    def interrupted(seed: int, prospect: str, *settings: Any) -> dict[str, Any]:
        searched.append((seed, prospect))
        if len(searched) == 2:
            raise KeyboardInterrupt
        return {"seed": seed, "prospect": prospect, "hit": True, "slower": False}

    monkeypatch.setattr("searches.evaluate.calibration.search_planted", interrupted)
    assert _run(monkeypatch, *PLANTED, f"outputs={tmp_path}") == 130
    assert _run(monkeypatch, *PLANTED, f"outputs={tmp_path}") == 0
    assert searched == [(0, "hopeful"), (1, "hopeful"), (1, "hopeful"), (0, "hopeless")]
    record = json.loads((tmp_path / "calibration.json").read_text(encoding="utf-8"))
    assert [(search["seed"], search["prospect"]) for search in record["searches"]] == searched[:2] + searched[3:]
    assert _run(monkeypatch, *PLANTED, "planted.seeds=3", f"outputs={tmp_path}") == 0
    assert searched[4:] == [(2, "hopeful")]
    monkeypatch.setattr("searches.evaluate.calibration.RESULTS_VERSION", 0)
    assert _run(monkeypatch, *PLANTED, f"outputs={tmp_path}") == 0
    assert searched[5:] == searched[:2] + searched[3:4]


def test_a_criterion_is_met_or_missed() -> None:
    assert Count("", 19, 20, minimum=0.95).passed
    assert not Count("", 18, 20, minimum=0.95).passed
    assert Count("", 1, 20, maximum=0.05).passed
    assert not Count("", 2, 20, maximum=0.05).passed
    assert not Count("", float("nan"), minimum=0.9).passed
    assert Count("x", 1, 20, maximum=0.01).cells() == ["x", "1 of 20", "0.05", "at most 0.01", "MISSED"]
    assert Count("x", 1, 20).cells()[3:] == ["", "met"]

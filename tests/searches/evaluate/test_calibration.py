"""Tests of ``searches.evaluate.calibration``: it passes correct intervals and winners, and fails wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerskip import Measurement
from searches.evaluate.calibration import summarise
from tests.searches.conftest import Launch

FEW = ("itself.comparisons=40", "itself.prompts=12", "coverage.resamplings=40", "coverage.prompts=[12]")
PLANTED = (
    *("itself.comparisons=1", "itself.max_winners=null", "coverage.resamplings=0", "planted.seeds=2", "planted.hopeless=1"),
    *("planted.layers=8", "planted.prompts=30", "planted.min_hits=0", "planted.search.study.n_trials=12"),
)


@pytest.mark.system
@pytest.mark.parametrize("width", [1.0, 0.3])
def test_correct_intervals_pass_and_narrow_ones_fail(
    width: float, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    interval = Measurement.interval

    def scaled(self: Measurement) -> tuple[float, float]:
        low, high = interval(self)
        return self.speedup - width * (self.speedup - low), self.speedup + width * (high - self.speedup)

    monkeypatch.setattr(Measurement, "interval", scaled)
    limits = ("coverage.minimum=0.85", "itself.max_winners=0.15")
    done = launch("evaluate.calibration", *FEW, *limits, "record=record.json", cwd=tmp_path)
    assert done.returncode == (0 if width == 1.0 else 4), done.stdout + done.stderr
    counts = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))["counts"]
    assert [(count["of"], count["passed"]) for count in counts] == [(40, width == 1.0)] * 3
    assert all(count["name"] in done.stdout for count in counts)
    assert ("MISSED" in done.stdout) == (width < 1)


@pytest.mark.system
def test_searches_are_judged_by_the_known_optimum(tmp_path: Path, launch: Launch) -> None:
    done = launch("evaluate.calibration", *PLANTED, "record=record.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert [count["of"] for count in record["counts"]] == [1, 3, 2]
    for search in record["searches"]:
        assert search["winner_speedup"] <= search["best_speedup"] * 1.001
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

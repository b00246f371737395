"""Tests of ``searches.evaluate.exactness``: counts and detected differences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerskip import DraftPlan
from layerskip.scan.scan import Scanner
from tests.searches.conftest import Launch

pytestmark = pytest.mark.system

PROGRAM = "evaluate.exactness"
SMALL = ("target=local", "target.device=cpu", "lengths=[1,3,4]", "thresholds=[0.05,0.3]", "count=2")


def test_every_setting_is_decoded_once(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    overrides = (*SMALL, f"target.path={tiny_folder}", f"outputs={tmp_path}", "masks=3")
    done = launch(PROGRAM, *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "| decodings that differ from their scans | 0 of 36 |" in done.stdout
    record = json.loads((tmp_path / "exactness.json").read_text())
    assert [row["decodings"] for row in record["masks"]] == [2 * 3 * 2] * 3
    assert all(row["rounds"] > 0 and row["drafted"] > row["accepted"] for row in record["masks"])
    assert sum(row["accepted"] for row in record["masks"]) > 0
    assert len({row["mask"] for row in record["masks"]}) == 3
    assert record["target"]["dtype"] == "float32"


def test_a_wrong_scan_is_detected(
    tiny_folder: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = Scanner.scan

    def wrong_scan(self: Scanner, masks: list[DraftPlan], *args: object, **kwargs: object) -> list[object]:
        scans = scan(self, masks, *args, **kwargs)  # type: ignore[arg-type]
        for each in scans:
            accepted = each.traces[-1].acceptance
            right = (accepted[:, 0] == 1.0).argmax()
            assert accepted[right, 0] == 1.0
            accepted[right, 0] = 0.0
        return list(scans)

    monkeypatch.setattr(Scanner, "scan", wrong_scan)
    overrides = (*SMALL, f"target.path={tiny_folder}", f"outputs={tmp_path}", "shares=[0.05]", "masks=1")
    done = launch(PROGRAM, *overrides, cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    differing = json.loads((tmp_path / "exactness.json").read_text())["differing"]
    assert {case["output"] for case in differing} == {True}
    assert len({case["prompt"] for case in differing}) == 1

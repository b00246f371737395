"""Tests of ``searches.evaluate.exactness``: counts and detected differences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerskip import DraftPlan
from layerskip.scan.scan import Scanner
from searches.evaluate.exactness import random_masks
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


def test_formats_need_a_target_that_reads_them(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    overrides = (*SMALL, f"target.path={tiny_folder}", f"outputs={tmp_path}")
    done = launch(PROGRAM, *overrides, "formats=[int4]", cwd=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (2, "error: formats: its weights are not packed on a CPU")
    done = launch(PROGRAM, *overrides, "formats=[int3]", cwd=tmp_path)
    assert done.returncode == 2
    assert "formats: 'int3' is not one of keep, int8, int4" in done.stderr


def test_plans_of_formats_are_drawn_by_chance() -> None:
    plans = random_masks(6, range(6), 20, [0.3], 0, ["int8", "int4"])
    assert len(set(plans)) == 20
    assert {bits for plan in plans for bits in plan.bits} == {0, 4, 8}  # 0 for what is skipped
    assert all(any(plan.attention) or any(plan.mlp) for plan in plans)
    kept = [plan.treatment(kind, layer) for plan in plans for kind in ("attention", "mlp") for layer in range(6)]
    assert set(kept) == {"skip", "int8", "int4"}


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

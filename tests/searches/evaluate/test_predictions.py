"""Tests of ``searches.evaluate.predictions``: its figures, and the program on a tiny model."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from scipy.stats import rankdata

from layerskip.models import packing
from tests.searches.conftest import Launch

pytestmark = pytest.mark.system

PROGRAM = "evaluate.predictions"


@pytest.mark.parametrize("methods", ["layer_skip", "quantized"])
def test_the_program_measures_its_predictions_and_resumes(
    methods: str, tiny_folder: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_LEAST", dict.fromkeys(packing._LEAST, 1))
    overrides = (
        *("target=local", f"target.path={tiny_folder}", "target.dtype=float32", "target.device=cpu", "masks=3"),
        *("lengths=[1,3]", "space.protect_first=0", "space.protect_last=0", "measure.max_new_tokens=8"),
        *("measure.prompts=2", f"outputs={tmp_path}", f"space.methods=[{methods}]"),
        *("min_correlation=null", "max_error=null", "max_trials=null"),  # times of a tiny model are too short
    )
    done = launch(PROGRAM, *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "predictions.json").read_text())
    points = record["points"]
    assert [point["num_speculative_tokens"] for point in points] == [1, 3] * 3
    plans = {point["mask"] for point in points}
    assert len(plans) == 3
    assert plans >= {"int8", "int4"} or methods == "layer_skip"
    assert all(point["predicted"] > 0 and point["measured"] > 0 for point in points)
    assert record["scan"]["masks"] == 3
    assert record["scan"]["trials"] == pytest.approx(64 * record["scan"]["seconds_per_mask"] / record["trial_seconds"])
    errors = [abs(point["predicted"] / point["measured"] - 1) for point in points]
    assert record["median_absolute_error"] == pytest.approx(statistics.median(errors))
    ranks = [rankdata([point[name] for point in points]) for name in ("predicted", "measured")]
    assert record["spearman"] == pytest.approx(statistics.correlation(*ranks))
    again = launch(PROGRAM, *overrides, "max_trials=0.000001", "min_correlation=1.5", cwd=tmp_path)
    assert again.returncode == 4, again.stderr
    missed = [line.split(" | ")[0] for line in again.stdout.splitlines() if line.endswith("| MISSED |")]
    assert missed == ["| rank correlation", "| 64 scans, in trials"]
    assert json.loads((tmp_path / "predictions.json").read_text())["points"] == points

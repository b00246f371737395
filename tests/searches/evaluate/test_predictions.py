"""Tests of ``searches.evaluate.predictions``: its figures, and the program on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerskip import PromptSet, SpeculativeConfig
from searches.evaluate.predictions import AGAIN, measured_metrics, prediction_error
from tests.searches.conftest import Launch
from tests.searches.known import Known

pytestmark = pytest.mark.system

PROGRAM = "evaluate.predictions"


def test_errors_and_correlation_of_known_points() -> None:
    pairs = ((1.1, 1.0), (0.9, 1.0), (2.2, 2.0), (0.5, 0.4))
    found = prediction_error([{"predicted": p, "measured": m, "predicted_from_real_rounds": 1.2 * m} for p, m in pairs])
    assert found["median_absolute_error_from_real_rounds"] == pytest.approx(0.2)
    assert found["median_absolute_error"] == pytest.approx(0.1)
    assert found["mean_error"] == pytest.approx((0.1 - 0.1 + 0.1 + 0.25) / 4)
    # Ranks 3, 2, 4, 1 against 2.5, 2.5, 4, 1: Pearson's correlation of them.
    assert found["spearman"] == pytest.approx(4.5 / (5.0 * 4.5) ** 0.5)


def test_speedups_are_relative_to_the_mean_of_both_baselines() -> None:
    configs = {"1": SpeculativeConfig("prompt_lookup", 1), AGAIN: SpeculativeConfig()}
    bench = Known({configs["1"]: 1.5, configs[AGAIN]: 0.8})  # the second measurement takes a quarter longer
    rows = list(bench.compare(configs, PromptSet.of(["one", "two"]), 1, 0))
    speedup, _, seconds = measured_metrics(rows, ["1"])["1"]
    assert speedup == pytest.approx(1.5 * (1 + 1.25) / 2)
    assert seconds == pytest.approx(2 * (0.1 + 1.0 + 0.1 + 1 / 1.5))


def test_the_program_measures_its_predictions_and_resumes(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    overrides = (
        *("target=local", f"target.path={tiny_folder}", "target.dtype=float32", "target.device=cpu", "masks=3"),
        *("lengths=[1,3]", "space.protect_first=0", "space.protect_last=0", "measure.max_new_tokens=8"),
        *("measure.prompts=2", f"outputs={tmp_path}"),
        *("min_correlation=null", "max_error=null", "max_trials=null"),  # times of a tiny model are too short
    )
    done = launch(PROGRAM, *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "predictions.json").read_text())
    assert [point["num_speculative_tokens"] for point in record["points"]] == [1, 3] * 3
    assert len({point["mask"] for point in record["points"]}) == 3
    assert all(point["predicted"] > 0 and point["measured"] > 0 for point in record["points"])
    assert record["scan"]["masks"] == 3
    assert record["scan"]["trials"] == pytest.approx(64 * record["scan"]["seconds_per_mask"] / record["trial_seconds"])
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")}
    again = launch(PROGRAM, *overrides, "max_trials=0.000001", "min_correlation=1.5", cwd=tmp_path)
    assert again.returncode == 4, again.stderr
    missed = [line.split(" | ")[0] for line in again.stdout.splitlines() if line.endswith("| MISSED |")]
    assert missed == ["| rank correlation", "| 64 scans, in trials"]
    assert json.loads((tmp_path / "predictions.json").read_text())["points"] == record["points"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")} == kept

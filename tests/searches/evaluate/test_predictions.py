"""The comparison of predictions with measurements: its figures, and the program on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerskip import PromptSet, SpeculativeConfig
from searches.evaluate.predictions import AGAIN, figures
from searches.predict.prediction_error import agreement
from tests.searches.conftest import Launch
from tests.searches.known import Known
from tests.searches.programs import execute


def test_figures_of_points_that_are_known() -> None:
    pairs = ((1.1, 1.0), (0.9, 1.0), (2.2, 2.0), (0.5, 0.4))
    found = agreement([{"predicted": p, "measured": m, "predicted_from_real_rounds": 1.2 * m} for p, m in pairs])
    assert found["median_absolute_error_from_real_rounds"] == pytest.approx(0.2)
    assert found["median_absolute_error"] == pytest.approx(0.1)
    assert found["mean_error"] == pytest.approx((0.1 - 0.1 + 0.1 + 0.25) / 4)
    # Ranks 3, 2, 4, 1 against 2.5, 2.5, 4, 1: Pearson's correlation of them.
    assert found["spearman"] == pytest.approx(4.5 / (5.0 * 4.5) ** 0.5)


def test_both_readings_of_plain_decoding_count() -> None:
    configs = {"1": SpeculativeConfig("prompt_lookup", 1), AGAIN: SpeculativeConfig()}
    bench = Known({configs["1"]: 1.5, configs[AGAIN]: 0.8})  # the second reading took a quarter longer
    rows = list(bench.compare(configs, PromptSet.of(["one", "two"]), 1, 0))
    speedup, _, seconds = figures(rows, ["1"])["1"]
    assert speedup == pytest.approx(1.5 * (1 + 1.25) / 2)
    assert seconds == pytest.approx(2 * (0.1 + 1.0 + 0.1 + 1 / 1.5))


def test_the_program_measures_what_it_foretold_and_goes_on(tiny_folder: Path, tmp_path: Path, launch: Launch) -> None:
    overrides = (
        *("target=local", f"target.path={tiny_folder}", "target.dtype=float32", "target.device=cpu", "masks=3"),
        *("lengths=[1,3]", "space.protect_first=0", "space.protect_last=0", "measure.max_new_tokens=8"),
        *("measure.prompts=2", "scan.profile_repeats=2", f"outputs={tmp_path}"),
        *("least_correlation=null", "most_error=null", "most_trials=null"),  # tiny times tell nothing
    )
    done = execute("foretell", *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "foretold.json").read_text())
    assert [point["draft_length"] for point in record["points"]] == [1, 3] * 3
    assert len({point["mask"] for point in record["points"]}) == 3
    assert all(point["predicted"] > 0 and point["measured"] > 0 for point in record["points"])
    assert record["scan"]["masks"] == 3
    assert record["scan"]["trials"] == pytest.approx(64 * record["scan"]["seconds_per_mask"] / record["trial_seconds"])
    assert (tmp_path / "foretold.png").stat().st_size > 1000
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")}
    again = launch("foretell", *overrides, "most_trials=0.000001", "least_correlation=1.5", cwd=tmp_path)
    assert again.returncode == 4, again.stderr
    missed = [line for line in again.stdout.splitlines() if line.startswith("MISSED")]
    assert missed == ["MISSED: a rank correlation of at least 1.5", "MISSED: 64 scans for at most 1e-06 real trials"]
    assert json.loads((tmp_path / "foretold.json").read_text())["points"] == record["points"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")} == kept


def _run(path: Path, predicted: float, measured: float, **others: object) -> str:
    points = [
        {
            "mask": mask,
            "draft_length": 2,
            "predicted": k * predicted,
            "predicted_from_real_rounds": 1.0,
            "measured": k * measured,
        }
        for k, mask in enumerate(("", "mlp:1", "mlp:2"), start=1)
    ]
    about = {"schema": "layerskip.foretold/1", "date": path.stem, "environment": {}, "target": {"name": "tiny"}}
    path.write_text(json.dumps(about | {"prompts": {"digest": "a"}, "max_new_tokens": 8, "points": points} | others))
    return str(path)


def test_runs_together_stand_beside_the_mean_of_what_they_measured(tmp_path: Path, launch: Launch) -> None:
    paths = [_run(tmp_path / "a.json", 1.0, 0.8), _run(tmp_path / "b.json", 1.1, 1.2)]
    done = launch("foretell", f"records=[{','.join(paths)}]", f"outputs={tmp_path}", cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert "MISSED: a median absolute error of at most 3.0%" in done.stdout
    record = json.loads((tmp_path / "foretold-together.json").read_text())
    assert [run["by_itself"]["mean_error"] for run in record["runs"]] == pytest.approx([0.25, -1 / 12])
    assert [run["beside_the_mean"]["mean_error"] for run in record["runs"]] == pytest.approx([0.0, 0.1])
    assert (len(record["points"]), record["mean_error"]) == (6, pytest.approx(0.05))
    assert record["median_difference"] == pytest.approx(1 / 3)
    assert "scan" not in record
    assert (tmp_path / "foretold-together.png").stat().st_size > 1000


def test_the_dearest_scans_of_runs_together_are_judged(tmp_path: Path, launch: Launch) -> None:
    costs = {name: {"scan": {"seconds_per_mask": each}, "trial_seconds": 32.0} for name, each in (("a", 1.0), ("b", 2.5))}
    paths = [_run(tmp_path / f"{name}.json", 1.0, 1.0, **cost) for name, cost in costs.items()]
    done = launch("foretell", f"records=[{','.join(paths)}]", f"outputs={tmp_path}", cwd=tmp_path)
    assert json.loads((tmp_path / "foretold-together.json").read_text())["scan"] == {"trials": 5.0}
    assert done.returncode == 4 and "MISSED: 64 scans for at most 4 real trials" in done.stdout
    done = launch("foretell", f"records=[{','.join(paths)}]", f"outputs={tmp_path}", "most_trials=5", cwd=tmp_path)
    assert "MISSED: 64" not in done.stdout


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"schema": "layerskip.race/1"}, "no record"),
        ({"max_new_tokens": 9}, "another max_new_tokens"),
        ({"environment": {"threads": 2}}, "another threads"),
        ({"points": []}, "other masks or draft lengths"),
    ],
)
def test_runs_of_different_things_are_refused(others: dict[str, object], says: str, tmp_path: Path, launch: Launch) -> None:
    paths = [_run(tmp_path / "a.json", 1.0, 0.8), _run(tmp_path / "b.json", 1.1, 1.2, **others)]
    done = launch("foretell", f"records=[{','.join(paths)}]", f"outputs={tmp_path}", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "records: " in done.stderr and "b.json" in done.stderr and says in done.stderr
    assert not (tmp_path / "foretold-together.json").exists()


def test_a_run_is_not_taken_together_with_itself(tmp_path: Path, launch: Launch) -> None:
    path = _run(tmp_path / "a.json", 1.0, 0.8)
    done = launch("foretell", f"records=[{path},{path}]", f"outputs={tmp_path}", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "each named once" in done.stderr


@pytest.mark.parametrize("override", ["lengths=[]", "lengths=[0]", "lengths=[a]", "masks=0", "seed=-1", "most_error=x"])
def test_what_cannot_be_foretold_is_refused_by_name(override: str, tmp_path: Path, launch: Launch) -> None:
    done = launch("foretell", override, f"outputs={tmp_path}", "target.device=cpu", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"error: {override.split('=')[0]}: ")

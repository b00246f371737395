"""Real studies of a tiny model by several processes."""

from __future__ import annotations

import json
from pathlib import Path

import optuna
import pytest

from searches.study.budget import preparation_seconds
from searches.study.leaderboard import FINISHED
from searches.tracking.names import DEVICE, WORKER
from searches.workers.pool import of_kind
from tests.searches.conftest import Launch
from tests.searches.programs import Fork, quick, runs, sqlite, stored_study, tracked

pytestmark = pytest.mark.system

TRIALS = 8


@pytest.fixture(scope="module")
def together(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return the outputs of a study of two workers, and what they printed."""
    outputs = tracked(tmp_path_factory.mktemp("together") / "outputs")
    overrides = quick(
        tiny_folder, outputs, f"study.n_trials={TRIALS}", "study.name=one", "space.methods=[none,prompt_lookup,layer_skip]"
    )
    with (
        Fork("searches.layerskip", *overrides, "worker=0", cwd=outputs.parent) as first,
        Fork("searches.layerskip", *overrides, "worker=1", cwd=outputs.parent) as second,
    ):
        ended = [process.wait() for process in (first, second)]
    assert [process.returncode for process in ended] == [0, 0], [process.stderr for process in ended]
    return outputs, [process.stdout for process in ended]


def test_two_workers_finish_a_study_together(together: tuple[Path, list[str]]) -> None:
    outputs, printed = together
    trials = stored_study(outputs, "one").trials
    done = [trial for trial in trials if trial.state in FINISHED]
    assert len(done) == TRIALS
    assert len({trial.user_attrs[WORKER] for trial in done}) == 2
    assert len({trial.user_attrs[DEVICE] for trial in done}) == 1
    assert sorted(int(run.data.tags["trial_number"]) for run in runs(sqlite(outputs), "trial")) == [t.number for t in done]
    assert [run.info.status for run in runs(sqlite(outputs), "study")] == ["FINISHED"]
    assert {run.info.status for run in runs(sqlite(outputs), "trial")} == {"FINISHED"}
    best = json.loads((outputs / "one" / "best.json").read_text(encoding="utf-8"))
    assert best["search"]["trials"] == TRIALS
    assert sum("Finalists" in text for text in printed) == 1  # one of them measured and published
    assert preparation_seconds(stored_study(outputs, "one")) > 0
    assert stored_study(outputs, "one").metric_names == ["speedup"]


def test_what_precedes_the_trials_is_made_once(together: tuple[Path, list[str]]) -> None:
    outputs, _ = together
    rows = optuna.load_study(study_name="one-workers", storage=f"sqlite:///{outputs}/one/study.db").trials
    values = [row.user_attrs["name"] for row in of_kind(rows, "claim") if "value" in row.user_attrs]
    assert len(values) == len(set(values))
    assert {"device"} <= set(values)
    assert sum(name.startswith("profile ") for name in values) == 1
    makers = {row.user_attrs["worker"] for row in of_kind(rows, "claim") if "value" in row.user_attrs}
    assert len(makers) == 2  # both scanned
    assert not list((outputs / "one").glob("scans-*/*.jsonl"))


def test_another_type_of_device_is_refused(
    together: tuple[Path, list[str]], tiny_folder: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("searches.study.sweep.device_type", lambda _: "another GPU")
    few = "study.name=one", "space.methods=[none,prompt_lookup]", "worker=2", "study.n_trials=1"
    refused = launch("layerskip", *quick(tiny_folder, together[0], *few), cwd=together[0].parent)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: study.name: study one measures on ")
    assert "another GPU" in refused.stderr

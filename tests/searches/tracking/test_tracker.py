"""What a user of MLflow reads of a study: the names of its runs, its description, and the run of the winner."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from layerskip import SpeculativeConfig
from layerskip.config import kinds
from searches.tracking.parameters import parameters
from searches.tracking.tracker import Tracker
from tests.searches.known import lookup
from tests.searches.programs import runs, sqlite, tracked
from tests.searches.tracking.studies import CASCADE, NOT_RUN, SKIP, SPEEDUPS, compared_study


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A store that holds the runs of the study."""
    uri, tracker = sqlite(tracked(tmp_path)), Tracker(None, tmp_path, "compared")
    tracker.open_study("a study", "1", {"measure.prompts": 8}, {})
    for trial in compared_study().trials:
        tracker.record(trial)
    tracker.conclude("no drafting", "The first sentence.", 1)
    tracker.conclude("cascade", "cascade wins: 1.90 x plain decoding.", 5)
    return uri


def _of_trials(uri: str) -> list[Run]:
    return sorted(runs(uri, "trial"), key=lambda run: int(run.data.tags["trial_number"]))


def test_the_name_of_a_run_tells_its_configuration(uri: str) -> None:
    names = [run.info.run_name for run in _of_trials(uri)]
    assert names == [f"{number} {config.label()}" for number, config in enumerate([*SPEEDUPS, NOT_RUN])]
    assert names[0] == "0 no drafting"
    assert "layers:2-3;attention:1" in names[2]


def test_the_study_tells_its_winner_and_only_the_winner_is_best(uri: str) -> None:
    (study,) = runs(uri, "study")
    assert study.data.tags["mlflow.note.content"] == "cascade wins: 1.90 x plain decoding."
    client = MlflowClient(uri)
    (best,) = client.search_runs([study.info.experiment_id], "tags.best = 'true'")
    assert best.data.tags["trial_number"] == "5"
    assert best.data.tags["mlflow.parentRunId"] == study.info.run_id


def test_every_run_has_a_value_on_the_axes_of_a_comparison(uri: str) -> None:
    for run, speedup in zip(_of_trials(uri), [*SPEEDUPS.values(), math.nan], strict=True):
        assert {"drafter", "draft_length", "skipped_attention", "skipped_mlp"} <= run.data.params.keys()
        assert run.data.metrics["tokens_per_second"] == pytest.approx(10 * speedup, nan_ok=True)
        assert math.isnan(run.data.metrics["acceptance_rate"]) == math.isnan(speedup)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SpeculativeConfig(), ("none", "0", "0", "0")),
        (lookup(4), ("lookup", "4", "0", "0")),
        (SKIP, ("layer_skip", "3", "3", "2")),
        (CASCADE, ("cascade", "8", "0", "0")),
        (SpeculativeConfig("cascade", members=(lookup(2), SKIP)), ("cascade", "3", "3", "2")),
    ],
)
def test_numbers_summarise_a_configuration(config: SpeculativeConfig, expected: tuple[str, ...]) -> None:
    found = parameters(config)
    assert tuple(found[name] for name in ("drafter", "draft_length", "skipped_attention", "skipped_mlp")) == expected


def test_no_name_of_a_drafter_is_cut_or_shared() -> None:
    required = {"draft": "a/draft", "head": "a/head", "members": (lookup(4), SKIP)}
    names = []
    for kind in kinds().values():
        fields = {name: value for name, value in required.items() if name in kind.fields}
        names.append(parameters(SpeculativeConfig(kind.name, **fields))["drafter"])  # type: ignore[arg-type]
    assert max(map(len, names)) <= 10  # MLflow shows no more
    assert len(set(names)) == len(names) > 10

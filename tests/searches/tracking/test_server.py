"""A study tracked on a real MLflow server, and its trials compared in the server's pages."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import mlflow.server
import pytest

from searches.tracking.tracker import Tracker
from tests.browser import CHROMIUM, Browser
from tests.searches.conftest import Launch
from tests.searches.programs import quick, runs, sqlite, tracked
from tests.searches.tracking.stores import TrackingServer
from tests.searches.tracking.studies import ACCEPTANCE, SPEEDUPS, compared_study

pytestmark = pytest.mark.system

PAGES = Path(mlflow.server.__file__).parent / "js" / "build" / "index.html"
SHOWN = {"num_speculative_tokens", "drafter", "skipped_attention", "tokens_per_second"}
"""The axes that MLflow chooses."""
ADDED = {2: "skipped_mlp", 4: "acceptance_rate"}
"""Further axes, by the place of the list that they are chosen from."""
_INPUT = ".du-bois-light-select-multiple:nth-child({}) input"
_AXES = "(plot => plot && plot.data[0].dimensions)(document.querySelector('.pcp-plot.js-plotly-plot'))"
_CROSSED = """Array.from(document.querySelectorAll('.pcp-plot canvas')).map(canvas => {
  const copy = document.createElement('canvas');
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const paper = copy.getContext('2d');
  paper.drawImage(canvas, 0, 0);
  const dots = paper.getImageData(0, 0, copy.width, copy.height).data;
  const rows = Array.from({length: copy.height}, (_, y) => y), columns = Array.from({length: copy.width}, (_, x) => x);
  const drawn = x => rows.filter(y => dots[4 * (y * copy.width + x) + 3] > 0).length;
  return columns.filter(x => drawn(x) >= 4).length / copy.width;
})"""
"""For each layer of the plot, the share of its columns of dots that at least four lines cross."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the server's store."""
    return tracked(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """Start an MLflow server."""
    with contextlib.closing(TrackingServer(sqlite(folder), folder / "artifacts")) as running:
        yield running.url


def test_a_study_is_tracked_on_a_server(
    server: str, folder: Path, tiny_folder: Path, tmp_path: Path, launch: Launch
) -> None:
    outputs = tmp_path / "outputs"
    overrides = quick(tiny_folder, outputs, f"tracking.uri={server}", "study.n_trials=2", "study.name=remote")
    done = launch("layerskip", *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "View run" not in done.stdout
    assert not (outputs / "mlflow.db").exists()
    assert len(runs(server, "trial")) == 2
    assert runs(server, "study")[0].info.status == "FINISHED"
    assert any((folder / "artifacts").rglob("best.json"))


@pytest.mark.skipif(CHROMIUM is None or not PAGES.exists(), reason="needs Chromium and MLflow's pages")
def test_the_trials_of_a_study_are_compared_by_parallel_coordinates(server: str, folder: Path) -> None:
    tracker = Tracker(None, folder, "compared")
    tracker.open_study("compared", "2", {"measure.prompts": 8}, {})
    for trial in compared_study().trials:
        tracker.record(trial)
    compared = [run for run in runs(server, "trial") if run.data.tags["study"] == "compared"]
    compared.sort(key=lambda run: int(run.data.tags["trial_number"]))
    compared += [run for run in runs(server, "study") if run.data.tags["study"] == "compared"]
    ids, experiment = json.dumps([run.info.run_id for run in compared]), json.dumps([compared[0].info.experiment_id])
    with Browser() as browser:
        browser.open(f"{server}/#/compare-runs?runs={ids}&experiments={experiment}", 1440, 1600)
        assert {axis["label"] for axis in browser.wait_for(_AXES)} == SHOWN
        for place, name in ADDED.items():
            browser.evaluate(f"document.querySelector('{_INPUT.format(place)}').focus()")
            browser.type(name, "Enter")
            browser.type("", "Escape")
        browser.wait_for(f"{_AXES}.length === {len(SHOWN) + len(ADDED)}")
        axes = {axis["label"]: axis for axis in browser.evaluate(_AXES)}
        browser.wait_for(f"{_CROSSED}.some(share => share > 0.5)")
    trials = len(SPEEDUPS) + 1  # the last was not run
    assert axes["skipped_attention"]["values"][:trials] == [0, 0, 3, 0, 0, 0, 0]
    assert axes["skipped_mlp"]["values"][:trials] == [0, 0, 2, 2, 0, 0, 0]
    assert axes["num_speculative_tokens"]["values"][:trials] == [0, 4, 3, 2, 6, 8, 5]
    drafters = [axes["drafter"]["ticktext"][place] for place in axes["drafter"]["values"]]
    assert drafters == ["none", "lookup", "layer_skip", "layer_skip", "recycling", "cascade", "lookup", "unknown"]
    # Neither the trial that was not run nor the study is drawn: their lines have no place and no colour.
    assert axes["acceptance_rate"]["values"] == [*ACCEPTANCE, None, None]
    *rates, not_run, study = axes["tokens_per_second"]["values"]
    assert rates == pytest.approx([10 * speedup for speedup in SPEEDUPS.values()])
    assert not_run is study is None
